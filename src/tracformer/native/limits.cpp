// The memory bandwidth of this machine, with which the speed of generation is compared. A reduction
// in torch is slower than memory.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "simd.h"

namespace tracformer {
namespace {

constexpr int kStreams = 8;            // independent sums, so that additions can overlap
constexpr int64_t kAheadFloats = 512;  // distance from the additions to the prefetches

float sum_of(const float* x, int64_t count) {
  constexpr int L = kLanes<float>;
  Vector<float> sums[kStreams] = {};
  int64_t i = 0;
  for (; i + kStreams * L <= count; i += kStreams * L) {
#pragma GCC unroll 8
    for (int s = 0; s < kStreams; ++s) {
      __builtin_prefetch(x + i + s * L + kAheadFloats);
      sums[s] += load(x + i + s * L);
    }
  }
  for (int s = 1; s < kStreams; ++s) sums[0] += sums[s];
  float total = sum_of_lanes<float>(sums[0]);
  for (; i < count; ++i) total += x[i];
  return total;
}

}  // namespace

// The sum of all elements, each read once, in order, by all threads together.
double streamed_sum(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous(), "x must be contiguous float32");
  const float* data = x.const_data_ptr<float>();
  return at::parallel_reduce(
      0, x.numel(), int64_t{1} << 16, 0.0, [&](int64_t from, int64_t until, double before) { return before + sum_of(data + from, until - from); },
      [](double a, double b) { return a + b; });
}

TORCH_LIBRARY_FRAGMENT(tracformer, m) { m.def("streamed_sum(Tensor x) -> float"); }

TORCH_LIBRARY_IMPL(tracformer, CPU, m) { m.impl("streamed_sum", streamed_sum); }

}  // namespace tracformer
