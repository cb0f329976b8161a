// io_uring engine: moves bytes between memory and files through one ring, owned by one thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace tierstore {

// Result of a transfer: error is 0 or an errno; failed_at is the file offset at which it
// stopped, or for a sync the index of the file that failed.
struct Outcome {
  int error = 0;
  uint64_t failed_at = 0;
};

enum class Kind { kRead, kWrite, kSync, kRegister };

// One read, write, sync or registration of any size. Plain data: destroying one in a forked child
// touches no lock that another thread of the parent may have held.
struct Transfer {
  // Set by submit().
  Kind kind = Kind::kSync;
  std::vector<int> fds;  // One for a read or write.
  uint64_t address = 0;
  uint64_t offset = 0;
  uint64_t nbytes = 0;

  // Owned by the ring's thread from submission until `ended`.
  uint64_t position = 0;  // Bytes (for a sync: files) covered by requests so far.
  unsigned requests_in_flight = 0;
  bool queued = true;  // Some part may still need a request.
  Outcome outcome;

  std::atomic<bool> submitted{false};
  std::atomic<bool> ended{false};
};

class UringEngine {
 public:
  // Throws std::system_error (the ring could not be made) or std::invalid_argument.
  UringEngine(unsigned queue_depth, uint64_t request_bytes);
  // Drains like close(); does nothing after abandon() or in a forked child.
  ~UringEngine();
  UringEngine(const UringEngine&) = delete;
  UringEngine& operator=(const UringEngine&) = delete;

  // The memory and the descriptor must stay valid until the transfer has ended.
  void submit(const std::shared_ptr<Transfer>& transfer, bool is_write, int fd,
              uint64_t address, uint64_t nbytes, uint64_t offset);
  // Covers all writes that ended before the call.
  void submit_sync(const std::shared_ptr<Transfer>& transfer, std::vector<int> fds);
  // Registers this memory with the kernel, in place of the memory registered before; zero bytes
  // or an error leave nothing registered. The memory must stay valid until a later registration
  // has ended or the engine is closed. Transfers may be in flight.
  void submit_register(const std::shared_ptr<Transfer>& transfer, uint64_t address,
                       uint64_t nbytes);
  // Blocks until the transfer has ended (the kernel no longer uses its memory); returns
  // nothing if that takes longer than the limit, so that the caller can handle signals.
  std::optional<Outcome> wait(const std::shared_ptr<Transfer>& transfer,
                              std::chrono::milliseconds limit);
  // Takes no more transfers, waits for all of them, then ends the thread and releases the
  // ring. Returns false if that takes longer than the limit: call it again.
  bool close(std::chrono::milliseconds limit);
  // Closes a forked child's descriptors of the ring, and nothing else.
  void abandon();

 private:
  class Core;
  void check_usable() const;
  void enqueue(const std::shared_ptr<Transfer>& transfer);
  void check_new(const std::shared_ptr<Transfer>& transfer) const;

  // A plain pointer: a forked child must not destroy it, because its mutex, condition and
  // thread belong to the parent.
  Core* core_;
  pid_t owner_;
};

}  // namespace tierstore
