// Decision after the completion of one I/O request. Pure: no ring, no clock, no globals.
#pragma once

#include <cerrno>
#include <cstdint>

namespace tierstore {

inline constexpr uint64_t kSectorBytes = 4096;
// How often one request may end in EINTR or EAGAIN before it fails.
inline constexpr int kRetriesMax = 16;

enum class Verdict { kDone, kResubmit, kFailed };

// One contiguous range of a file that has not been moved yet. A request of zero bytes (an
// fdatasync) is done by the result 0.
class Request {
 public:
  Request(uint64_t offset, uint64_t nbytes) : offset_(offset), bytes_remaining_(nbytes) {}

  // Takes the result of a completion: the bytes moved, or a negative errno.
  Verdict complete(int64_t result) {
    if (result < 0) return retry_or_fail(result);
    const auto bytes_moved = static_cast<uint64_t>(result);
    if (bytes_moved > bytes_remaining_) return fail(EIO);
    if (bytes_moved == bytes_remaining_) {
      advance(bytes_moved);
      return Verdict::kDone;
    }
    // Keep whole sectors only, so that the resubmitted tail stays aligned.
    const uint64_t bytes_kept = bytes_moved / kSectorBytes * kSectorBytes;
    if (bytes_kept == 0) return fail(EIO);  // No progress: fail, never loop.
    advance(bytes_kept);
    return Verdict::kResubmit;
  }

  uint64_t offset() const { return offset_; }
  uint64_t bytes_remaining() const { return bytes_remaining_; }
  // The errno of a failed request, otherwise 0.
  int error() const { return error_; }

 private:
  Verdict retry_or_fail(int64_t result) {
    const bool transient = result == -EINTR || result == -EAGAIN;
    if (transient && retries_ < kRetriesMax) {
      ++retries_;
      return Verdict::kResubmit;
    }
    // A value that is not an errno must not wrap around to success when negated.
    return fail(result >= -4095 ? static_cast<int>(-result) : EIO);
  }

  Verdict fail(int error) {
    error_ = error;
    return Verdict::kFailed;
  }

  void advance(uint64_t nbytes) {
    offset_ += nbytes;
    bytes_remaining_ -= nbytes;
  }

  uint64_t offset_;
  uint64_t bytes_remaining_;
  int retries_ = 0;
  int error_ = 0;
};

}  // namespace tierstore
