// Threads that go through a sequence of stages together.
//
// A stage ends when all its portions are done. Threads take portions one by one, and none waits for
// another to arrive. So a thread that is slower, or that has lost its core to another process,
// delays the others by one portion at most. For the same reason the threads are not OpenMP's: at
// the end of a parallel region OpenMP waits for all of them, also for one that has not begun because
// other processes keep the cores busy.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace tracformer {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Waits for something that a running thread does at once. If it takes longer than a portion, that
// thread has lost its core; then other processes may run here.
class Patience {
 public:
  void wait() {
    if (++spins_ < 2000)
      pause();
    else
      std::this_thread::yield();
  }

 private:
  int spins_ = 0;
};

// Helper threads, which wait for work. A forked process has none, and nothing waits for them there.
class Helpers {
 public:
  static Helpers& shared() {
    static Helpers& helpers = *new Helpers;  // never destroyed, since its threads run to the end
    return helpers;
  }

  // Runs work() in this thread and in at most `most` helpers. Returns when this thread and the
  // helpers that have begun are done. If another thread uses the helpers, this one works alone.
  template <typename Work>
  void run(int64_t most, const Work& work) {
    const std::unique_lock<std::mutex> use(used_, std::try_to_lock);
    if (!use) return work();
    try {
      for (; threads_ < most; ++threads_) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads are to be had: there are fewer helpers
    }
    work_ = [](const void* what) { (*static_cast<const Work*>(what))(); }, what_ = &work;
    places_.store(most, std::memory_order_release);
    calls_.fetch_add(1, std::memory_order_release), calls_.notify_all();
    work();
    places_.fetch_and(~kFree, std::memory_order_relaxed);  // a helper that has not begun is too late
    for (Patience patience; places_.load(std::memory_order_acquire) != 0;) patience.wait();
  }

 private:
  // In `places_`, the number of helpers that may still begin, and that of those at work.
  static constexpr int64_t kAtWork = 1 << 16, kFree = kAtWork - 1;
  static constexpr std::chrono::milliseconds kAwake{2};  // after work, before it sleeps

  void serve() {
    for (uint32_t seen = 0;;) {
      await(seen);
      seen = calls_.load(std::memory_order_acquire);
      int64_t places = places_.load(std::memory_order_relaxed);
      while (places & kFree) {
        if (!places_.compare_exchange_weak(places, places - 1 + kAtWork, std::memory_order_acquire, std::memory_order_relaxed)) continue;
        work_(what_);  // both stay as they are while a helper is at work
        places_.fetch_sub(kAtWork, std::memory_order_release);
        break;
      }
    }
  }

  void await(uint32_t seen) {
    const auto end = std::chrono::steady_clock::now() + kAwake;
    for (Patience patience; calls_.load(std::memory_order_relaxed) == seen; patience.wait())
      if (std::chrono::steady_clock::now() > end) return calls_.wait(seen);
  }

  std::mutex used_;
  int64_t threads_ = 0;
  void (*work_)(const void*) = nullptr;
  const void* what_ = nullptr;
  std::atomic<int64_t> places_{0};
  std::atomic<uint32_t> calls_{0};
};

struct alignas(64) Stage {
  std::atomic<int64_t> taken{0}, done{0};
};

class Member {
 public:
  Member(std::vector<Stage>& stages, int64_t size) : stages_(stages), size_(size) {}

  int64_t size() const { return size_; }

  // The next stage: work(from, to) over parts of 0 .. total-1 in whole units, in about `portions`
  // portions. On return the stage is complete and its results are visible to this thread. Nothing
  // that a stage reads may change before its end, so a thread may only use it within `work`.
  template <typename Work>
  void stage(int64_t total, int64_t unit, int64_t portions, const Work& work) {
    if (size_ == 1) return work(int64_t{0}, total);
    Stage& stage = stages_[next_++];
    const int64_t units = (total + unit - 1) / unit;
    portions = std::clamp<int64_t>(portions, 1, units);
    for (int64_t p; (p = stage.taken.fetch_add(1, std::memory_order_relaxed)) < portions;) {
      work(units * p / portions * unit, std::min(total, units * (p + 1) / portions * unit));
      stage.done.fetch_add(1, std::memory_order_acq_rel);
    }
    for (Patience patience; stage.done.load(std::memory_order_acquire) < portions;) patience.wait();
  }

 private:
  std::vector<Stage>& stages_;
  const int64_t size_;
  size_t next_ = 0;
};

inline thread_local bool in_team = false;  // whether this thread runs a member's work

// Runs work(member) on PyTorch's number of threads, at most `most`; all go through the same stages.
// It must not throw, because the others would wait forever.
template <typename Work>
void together(int64_t most, int64_t stages, const Work& work) {
  const int64_t size = in_team || at::in_parallel_region() ? 1 : std::min<int64_t>(at::get_num_threads(), most);
  std::vector<Stage> shared(size > 1 ? stages : 0);
  if (size <= 1) return work(Member(shared, 1));
  Helpers::shared().run(size - 1, [&] {
    in_team = true;
    work(Member(shared, size));
    in_team = false;
  });
}

}  // namespace tracformer
