// A pool of threads that walk through the phases of a step together.
//
// In a phase every unit of work is done once, by whichever thread takes it; nobody enters a phase before everybody has
// left the one before it. Waiting is a short spin, then a sleep in the kernel, so that threads which share a core with
// other work do not burn the time of those they wait for.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trimtab {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A number that threads wait on to change.
class Epoch {
 public:
  uint32_t now() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  void wait_beyond(uint32_t seen, size_t spins) {
    for (size_t i = 0; i < spins; ++i) {
      if (now() != seen) return;
      pause_briefly();
    }
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (now() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void futex(int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, value, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

// The units that one thread has yet to do: it takes from the front, others from the back.
class alignas(64) Range {
 public:
  void set(uint32_t begin, uint32_t end) { both_.store(pack(begin, end), std::memory_order_relaxed); }

  bool take(bool from_front, uint32_t* unit) {
    uint64_t seen = both_.load(std::memory_order_relaxed);
    for (;;) {
      uint32_t begin = uint32_t(seen >> 32), end = uint32_t(seen);
      if (begin == end) return false;
      *unit = from_front ? begin : end - 1;
      uint64_t left = from_front ? pack(begin + 1, end) : pack(begin, end - 1);
      if (both_.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return true;
    }
  }

 private:
  static uint64_t pack(uint32_t begin, uint32_t end) { return uint64_t(begin) << 32 | end; }

  std::atomic<uint64_t> both_{0};
};

class Pool {
 public:
  explicit Pool(size_t num_threads) : ranges_(new Range[num_threads]), num_threads_(num_threads) {
    for (size_t i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    job_ = nullptr;
    start_.advance();
    for (std::thread& worker : workers_) worker.join();
  }

  size_t num_threads() const { return num_threads_; }

  // Runs `job(thread)` on every thread, and returns when all have ended. All of them go through the same phases.
  template <class Job>
  void run(Job& job) {
    job_ = [](void* context, size_t thread) { (*static_cast<Job*>(context))(thread); };
    context_ = &job;
    start_.advance();
    job(0);
    barrier([] {});
  }

  // Does the units 0 to num_units - 1, once everybody has done those of the phase before.
  template <class Function>
  void phase(size_t thread, size_t num_units, Function unit) {
    barrier([&] { share(num_units); });
    uint32_t taken;
    for (size_t i = 0; i < num_threads_; ++i)
      while (ranges_[(thread + i) % num_threads_].take(i == 0, &taken)) unit(size_t(taken));
  }

 private:
  static constexpr size_t kSpins = 300;  // about 10 us

  // Waits for everybody; whoever comes last calls `last` before anybody goes on.
  template <class Function>
  void barrier(Function last) {
    uint32_t seen = passed_.now();
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      num_arrived_.store(0, std::memory_order_relaxed);
      last();
      passed_.advance();
    } else {
      passed_.wait_beyond(seen, kSpins);
    }
  }

  void share(size_t num_units) {
    for (size_t i = 0; i < num_threads_; ++i)
      ranges_[i].set(uint32_t(num_units * i / num_threads_), uint32_t(num_units * (i + 1) / num_threads_));
  }

  void work(size_t thread) {
    for (uint32_t seen = 0;; ++seen) {
      start_.wait_beyond(seen, kSpins);
      if (job_ == nullptr) return;
      job_(context_, thread);
      barrier([] {});
    }
  }

  Epoch start_, passed_;
  alignas(64) std::atomic<size_t> num_arrived_{0};
  void (*job_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  std::unique_ptr<Range[]> ranges_;
  size_t num_threads_;
  std::vector<std::thread> workers_;
};

}  // namespace trimtab
