#include "uring_engine.hpp"

#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "request.hpp"

namespace tierstore {
namespace {

constexpr uint64_t kRequestBytesMax = uint64_t{1} << 30;
constexpr unsigned kQueueDepthMax = 1024;
// Most bytes of one registered buffer.
constexpr uint64_t kPieceBytes = uint64_t{1} << 30;
// How often, and at what interval, a submission is retried when the kernel has no memory for it.
constexpr int kRefusalsMax = 1000;
constexpr std::chrono::milliseconds kRefusedPause{10};
constexpr uint64_t kWakeTag = UINT64_MAX;

std::system_error os_error(int error, const char* what) {
  return std::system_error(error, std::generic_category(), what);
}

}  // namespace

// The ring, its thread, and the state they share with callers.
class UringEngine::Core {
 public:
  Core(unsigned queue_depth, uint64_t request_bytes);
  ~Core();

  void enqueue(const std::shared_ptr<Transfer>& transfer);
  std::optional<Outcome> wait(const Transfer& transfer, std::chrono::milliseconds limit);
  bool stop(std::chrono::milliseconds limit);
  void close_descriptors();

 private:
  // One request in flight.
  struct Slot {
    std::shared_ptr<Transfer> transfer;
    Request request{0, 0};
    int fd = -1;
  };

  void make_ring();
  void start_thread();
  void wake();
  void run();
  bool take_new_work();
  void arm_wake();
  void fill_slots();
  bool register_memory(Transfer& transfer);
  std::optional<int> registered_piece(uint64_t address, uint64_t nbytes) const;
  void prepare(unsigned slot_index);
  void submit_and_wait();
  void reap();
  void complete(unsigned slot_index, int result);
  void publish_ended();

  // Shared with callers, under mutex_.
  std::mutex mutex_;
  std::condition_variable some_ended_;  // A transfer or the thread has ended.
  std::deque<std::shared_ptr<Transfer>> submitted_;
  bool stopping_ = false;
  bool thread_ended_ = false;
  bool released_ = false;

  // Used by the thread only.
  const unsigned queue_depth_;
  const uint64_t request_bytes_;
  io_uring ring_{};
  int wake_fd_ = -1;
  bool wake_armed_ = false;
  int refusals_ = 0;
  uint64_t registered_address_ = 0;
  uint64_t registered_bytes_ = 0;
  std::vector<Slot> slots_;
  std::vector<unsigned> free_slots_;
  std::deque<std::shared_ptr<Transfer>> active_;  // Transfers whose requests are not all made.
  std::vector<std::shared_ptr<Transfer>> ended_;
  std::thread thread_;
};

UringEngine::Core::Core(unsigned queue_depth, uint64_t request_bytes)
    : queue_depth_(queue_depth), request_bytes_(request_bytes), slots_(queue_depth) {
  for (unsigned index = 0; index < queue_depth; ++index) free_slots_.push_back(index);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) throw os_error(errno, "eventfd");
  try {
    make_ring();
  } catch (...) {
    ::close(wake_fd_);
    throw;
  }
  try {
    start_thread();
  } catch (...) {
    io_uring_queue_exit(&ring_);
    ::close(wake_fd_);
    throw;
  }
}

UringEngine::Core::~Core() {
  while (!stop(std::chrono::hours(1))) {
  }
}

void UringEngine::Core::make_ring() {
  // One entry more than the requests, for the wake-up: a free entry always exists.
  int result = io_uring_queue_init(queue_depth_ + 1, &ring_, 0);
  if (result < 0) throw os_error(-result, "io_uring_queue_init");
  result = io_uring_ring_dontfork(&ring_);
  if (result < 0) {
    io_uring_queue_exit(&ring_);
    throw os_error(-result, "io_uring_ring_dontfork");
  }
}

void UringEngine::Core::start_thread() {
  // The interpreter's threads handle signals: the new thread inherits a mask that blocks all.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

void UringEngine::Core::enqueue(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) {
    // A later wait() for this transfer must return.
    transfer->outcome = Outcome{ECANCELED, transfer->offset};
    transfer->ended = true;
    throw std::runtime_error("the engine is closed");
  }
  submitted_.push_back(transfer);
  wake();
}

std::optional<Outcome> UringEngine::Core::wait(const Transfer& transfer,
                                               std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!some_ended_.wait_for(lock, limit, [&] { return transfer.ended.load(); })) return {};
  return transfer.outcome;
}

bool UringEngine::Core::stop(std::chrono::milliseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (released_) return true;
  if (!stopping_) {
    stopping_ = true;
    wake();
  }
  if (!some_ended_.wait_for(lock, limit, [&] { return thread_ended_; })) return false;
  if (released_) return true;  // Another caller was first.
  thread_.join();  // Does not block: the thread no longer takes the mutex.
  io_uring_queue_exit(&ring_);
  ::close(wake_fd_);
  released_ = true;
  return true;
}

void UringEngine::Core::close_descriptors() {
  // No io_uring_queue_exit(): the ring's memory is not mapped in a forked child, and its
  // addresses may be in use for other memory.
  ::close(ring_.ring_fd);
  ::close(wake_fd_);
}

// Called under the mutex, so that no other thread can close the descriptor meanwhile.
void UringEngine::Core::wake() {
  const uint64_t one = 1;
  // Fails only if the counter is full; a wake-up is then pending already.
  [[maybe_unused]] const ssize_t written = ::write(wake_fd_, &one, sizeof one);
}

void UringEngine::Core::run() {
  for (;;) {
    const bool stopping = take_new_work();
    fill_slots();
    publish_ended();
    if (stopping && active_.empty() && free_slots_.size() == slots_.size()) break;
    if (!wake_armed_) arm_wake();
    submit_and_wait();
    reap();
  }
  // Before callers may free the memory: the kernel destroys a closed ring with a delay.
  if (registered_bytes_ > 0) io_uring_unregister_buffers(&ring_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    thread_ended_ = true;
  }
  some_ended_.notify_all();
}

// Returns whether the engine is stopping; transfers submitted before that still run.
bool UringEngine::Core::take_new_work() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& transfer : submitted_) active_.push_back(std::move(transfer));
  submitted_.clear();
  return stopping_;
}

void UringEngine::Core::arm_wake() {
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
  io_uring_sqe_set_data64(sqe, kWakeTag);
  wake_armed_ = true;
}

// Cuts the oldest transfers into requests until every slot is in use.
void UringEngine::Core::fill_slots() {
  while (!free_slots_.empty() && !active_.empty()) {
    const std::shared_ptr<Transfer> transfer = active_.front();
    if (transfer->kind == Kind::kRegister && !register_memory(*transfer)) return;
    const bool sync = transfer->kind == Kind::kSync;
    const uint64_t size = sync ? transfer->fds.size() : transfer->nbytes;
    if (transfer->outcome.error != 0 || transfer->position == size) {
      active_.pop_front();
      transfer->queued = false;
      // With requests in flight the last of them ends the transfer.
      if (transfer->requests_in_flight == 0) ended_.push_back(transfer);
      continue;
    }
    const unsigned slot_index = free_slots_.back();
    free_slots_.pop_back();
    const uint64_t position = transfer->position;
    const uint64_t step = sync ? 1 : std::min(request_bytes_, size - position);
    const Request request =
        sync ? Request(position, 0) : Request(transfer->offset + position, step);
    slots_[slot_index] = Slot{transfer, request, transfer->fds[sync ? position : 0]};
    transfer->position += step;
    ++transfer->requests_in_flight;
    prepare(slot_index);
  }
}

// Returns false if it must wait until nothing is in flight. Before Linux 5.13 the kernel itself
// waits for this, and would wait forever for the armed wake-up.
bool UringEngine::Core::register_memory(Transfer& transfer) {
  if (free_slots_.size() != slots_.size()) return false;
  if (wake_armed_) {
    wake();
    return false;
  }
  if (registered_bytes_ > 0) io_uring_unregister_buffers(&ring_);
  registered_bytes_ = 0;
  std::vector<iovec> pieces;
  for (uint64_t start = 0; start < transfer.nbytes; start += kPieceBytes) {
    pieces.push_back({reinterpret_cast<void*>(transfer.address + start),
                      std::min(kPieceBytes, transfer.nbytes - start)});
  }
  transfer.position = transfer.nbytes;
  if (pieces.empty()) return true;
  const int result =
      io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
  if (result < 0) {
    transfer.outcome = Outcome{-result, 0};
    return true;
  }
  registered_address_ = transfer.address;
  registered_bytes_ = transfer.nbytes;
  return true;
}

// Returns the index of the registered buffer that contains this memory, if any.
std::optional<int> UringEngine::Core::registered_piece(uint64_t address, uint64_t nbytes) const {
  if (address < registered_address_) return {};
  const uint64_t first = address - registered_address_;
  if (first >= registered_bytes_ || nbytes > registered_bytes_ - first) return {};
  const uint64_t piece = first / kPieceBytes;
  if ((first + nbytes - 1) / kPieceBytes != piece) return {};
  return static_cast<int>(piece);
}

void UringEngine::Core::prepare(unsigned slot_index) {
  const Slot& slot = slots_[slot_index];
  const Transfer& transfer = *slot.transfer;
  io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
  const uint64_t offset = slot.request.offset();
  const auto nbytes = static_cast<unsigned>(slot.request.bytes_remaining());
  const uint64_t address = transfer.address + (offset - transfer.offset);
  const std::optional<int> piece = registered_piece(address, nbytes);
  auto* memory = reinterpret_cast<void*>(address);
  switch (transfer.kind) {
    case Kind::kRead:
      if (piece) {
        io_uring_prep_read_fixed(sqe, slot.fd, memory, nbytes, offset, *piece);
      } else {
        io_uring_prep_read(sqe, slot.fd, memory, nbytes, offset);
      }
      break;
    case Kind::kWrite:
      if (piece) {
        io_uring_prep_write_fixed(sqe, slot.fd, memory, nbytes, offset, *piece);
      } else {
        io_uring_prep_write(sqe, slot.fd, memory, nbytes, offset);
      }
      break;
    case Kind::kSync:
      io_uring_prep_fsync(sqe, slot.fd, IORING_FSYNC_DATASYNC);
      break;
    case Kind::kRegister:  // Makes no requests.
      break;
  }
  io_uring_sqe_set_data64(sqe, slot_index);
}

// Gives all prepared entries to the kernel in one call and sleeps until one completes.
void UringEngine::Core::submit_and_wait() {
  const int result = io_uring_submit_and_wait(&ring_, 1);
  if (result >= 0) refusals_ = 0;
  if (result >= 0 || result == -EINTR) return;
  if ((result == -EAGAIN || result == -EBUSY) && ++refusals_ < kRefusalsMax) {
    // The kernel has no memory for requests. Entries stay prepared for the next call.
    std::this_thread::sleep_for(kRefusedPause);
    return;
  }
  // An error cannot be returned safely, because the kernel may still use the callers' memory.
  // Continuing would lose requests.
  std::fprintf(stderr, "tierstore: io_uring_enter failed with errno %d\n", -result);
  std::abort();
}

void UringEngine::Core::reap() {
  unsigned head;
  unsigned count = 0;
  io_uring_cqe* cqe;
  io_uring_for_each_cqe(&ring_, head, cqe) {
    ++count;
    if (cqe->user_data == kWakeTag) {
      uint64_t wakes;
      [[maybe_unused]] const ssize_t nbytes = ::read(wake_fd_, &wakes, sizeof wakes);
      wake_armed_ = false;
    } else {
      complete(static_cast<unsigned>(cqe->user_data), cqe->res);
    }
  }
  io_uring_cq_advance(&ring_, count);
}

void UringEngine::Core::complete(unsigned slot_index, int result) {
  Slot& slot = slots_[slot_index];
  Transfer& transfer = *slot.transfer;
  const Verdict verdict = slot.request.complete(result);
  if (verdict == Verdict::kResubmit && transfer.outcome.error == 0) {
    prepare(slot_index);
    return;
  }
  if (verdict == Verdict::kFailed && transfer.outcome.error == 0) {
    transfer.outcome = Outcome{slot.request.error(), slot.request.offset()};
  }
  const std::shared_ptr<Transfer> owner = std::move(slot.transfer);
  free_slots_.push_back(slot_index);
  --owner->requests_in_flight;
  // A transfer still in active_ is ended by fill_slots(), which takes it out.
  if (owner->requests_in_flight == 0 && !owner->queued) ended_.push_back(owner);
}

void UringEngine::Core::publish_ended() {
  if (ended_.empty()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& transfer : ended_) transfer->ended = true;
  }
  some_ended_.notify_all();
  ended_.clear();
}

UringEngine::UringEngine(unsigned queue_depth, uint64_t request_bytes)
    : core_(nullptr), owner_(getpid()) {
  if (queue_depth < 1 || queue_depth > kQueueDepthMax) {
    throw std::invalid_argument("queue_depth must lie in 1..1024");
  }
  if (request_bytes == 0 || request_bytes % kSectorBytes != 0 || request_bytes > kRequestBytesMax) {
    throw std::invalid_argument("request_bytes must be a multiple of 4096, at most 1 GiB");
  }
  core_ = new Core(queue_depth, request_bytes);
}

UringEngine::~UringEngine() {
  if (core_ == nullptr || getpid() != owner_) return;
  delete core_;
}

void UringEngine::check_usable() const {
  if (core_ == nullptr || getpid() != owner_) {
    throw std::runtime_error("the engine belongs to the parent of this forked process");
  }
}

void UringEngine::check_new(const std::shared_ptr<Transfer>& transfer) const {
  if (transfer->submitted.exchange(true)) {
    throw std::invalid_argument("a ticket serves one transfer only");
  }
}

void UringEngine::enqueue(const std::shared_ptr<Transfer>& transfer) {
  core_->enqueue(transfer);
}

void UringEngine::submit(const std::shared_ptr<Transfer>& transfer, bool is_write, int fd,
                         uint64_t address, uint64_t nbytes, uint64_t offset) {
  check_usable();
  check_new(transfer);
  transfer->kind = is_write ? Kind::kWrite : Kind::kRead;
  transfer->fds = {fd};
  transfer->address = address;
  transfer->offset = offset;
  transfer->nbytes = nbytes;
  enqueue(transfer);
}

void UringEngine::submit_sync(const std::shared_ptr<Transfer>& transfer, std::vector<int> fds) {
  check_usable();
  check_new(transfer);
  transfer->kind = Kind::kSync;
  transfer->fds = std::move(fds);
  enqueue(transfer);
}

void UringEngine::submit_register(const std::shared_ptr<Transfer>& transfer, uint64_t address,
                                  uint64_t nbytes) {
  check_usable();
  check_new(transfer);
  transfer->kind = Kind::kRegister;
  transfer->address = address;
  transfer->nbytes = nbytes;
  enqueue(transfer);
}

std::optional<Outcome> UringEngine::wait(const std::shared_ptr<Transfer>& transfer,
                                         std::chrono::milliseconds limit) {
  check_usable();
  if (!transfer->submitted) throw std::invalid_argument("the ticket was never submitted");
  return core_->wait(*transfer, limit);
}

bool UringEngine::close(std::chrono::milliseconds limit) {
  check_usable();
  return core_->stop(limit);
}

void UringEngine::abandon() {
  if (core_ == nullptr) return;
  core_->close_descriptors();
  core_ = nullptr;
}

}  // namespace tierstore
