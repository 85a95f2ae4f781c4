// Threads that go through a sequence of stages together, in one parallel region.
//
// A stage ends when all its portions are done. Threads take portions one by one, and none waits for
// another to arrive. So a thread that is slower, or that has lost its core to another process,
// delays the others by one portion at most.
#pragma once

#include <ATen/Parallel.h>
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace tracformer {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

struct alignas(64) Stage {
  std::atomic<int64_t> taken{0}, done{0};
};

class Member {
 public:
  Member(std::vector<Stage>& stages, int size) : stages_(stages), size_(size) {}

  int size() const { return size_; }

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
    for (int spins = 0; stage.done.load(std::memory_order_acquire) < portions; ++spins)
      if (spins < 2000)  // longer than a portion takes: the other thread has lost its core
        pause();
      else
        std::this_thread::yield();
  }

 private:
  std::vector<Stage>& stages_;
  const int size_;
  size_t next_ = 0;
};

// Runs work(member) on PyTorch's number of threads, at most `most`; all go through the same stages.
// It must not throw, because the others would wait forever.
template <typename Work>
void together(int64_t most, int64_t stages, const Work& work) {
  if (most <= 1 || at::get_num_threads() <= 1 || at::in_parallel_region()) {
    std::vector<Stage> none;
    return work(Member(none, 1));
  }
  std::vector<Stage> shared(stages);
#pragma omp parallel  // all threads: with fewer, OpenMP would end the rest and restart them later
  {
    const int number = omp_get_thread_num(), size = static_cast<int>(std::min<int64_t>(omp_get_num_threads(), most));
    if (number < size) work(Member(shared, size));
  }
}

}  // namespace tracformer
