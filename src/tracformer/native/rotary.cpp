// One pass from a projection's output to queries, keys and values: split, rotated to their
// positions, widened from bfloat16. And its gradient.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tracformer {
namespace {

using at::Tensor;

constexpr int64_t kElementsAThread = 1 << 14;

// A bfloat16 is the upper half of a float's bits. It is handled as these bits, so that loops over
// it are vectorised.
struct Half {
  uint16_t bits;
};

inline float wide(Half x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
inline float wide(float x) { return x; }
inline double wide(double x) { return x; }

inline void assign(Half& to, float x) {  // round to nearest even; a NaN stays a NaN
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}
inline void assign(float& to, float x) { to = x; }
inline void assign(double& to, double x) { to = x; }

// Rotates the pair (x_i, x_{i + D/2}) of every head by its angle; the backward pass rotates by the
// opposite angle.
template <typename From, typename To, typename T>
void turn(const From* __restrict from, To* __restrict to, int64_t heads, int64_t half, const T* __restrict cos, const T* __restrict sin, T sign) {
  for (int64_t h = 0; h < heads; ++h, from += 2 * half, to += 2 * half)
    for (int64_t i = 0; i < half; ++i) {
      const T a = wide(from[i]), b = wide(from[i + half]), c = cos[i], s = sign * sin[i];
      assign(to[i], a * c - b * s);
      assign(to[i + half], b * c + a * s);
    }
}

template <typename From, typename To>
void copy(const From* __restrict from, To* __restrict to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) assign(to[i], wide(from[i]));
}

struct Sizes {
  int64_t rows, heads, half;
  int64_t width() const { return 2 * half * heads; }
};

Sizes check(int64_t rows, int64_t width, const Tensor& cos, const Tensor& sin, int64_t heads) {
  TORCH_CHECK(cos.sizes() == sin.sizes() && cos.is_contiguous() && sin.is_contiguous(), "the angles are ", cos.sizes(), " and ", sin.sizes());
  const int64_t half = cos.size(-1);
  TORCH_CHECK(cos.numel() == rows * half, "there are angles of ", cos.numel() / std::max<int64_t>(half, 1), " rows for ", rows);
  TORCH_CHECK(width == 2 * half * heads, "a row of ", width, " is not ", heads, " heads of ", 2 * half);
  return {rows, heads, half};
}

// x: (M, parts * heads * D) -> `parts` tensors (M, heads, D), the first `turned` of them rotated;
// bfloat16 becomes float.
template <typename In, typename T>
void split(const In* x, const std::vector<T*>& outs, const T* cos, const T* sin, Sizes s, size_t turned) {
  const int64_t width = s.width(), stride = width * static_cast<int64_t>(outs.size());
  at::parallel_for(0, s.rows, std::max<int64_t>(1, kElementsAThread / stride), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (size_t p = 0; p < outs.size(); ++p) {
        const In* from = x + m * stride + static_cast<int64_t>(p) * width;
        if (p < turned)
          turn(from, outs[p] + m * width, s.heads, s.half, cos + m * s.half, sin + m * s.half, T(1));
        else
          copy(from, outs[p] + m * width, width);
      }
  });
}

template <typename Out, typename T>
void join(const std::vector<const T*>& grads, Out* x, const T* cos, const T* sin, Sizes s, size_t turned) {
  const int64_t width = s.width(), stride = width * static_cast<int64_t>(grads.size());
  at::parallel_for(0, s.rows, std::max<int64_t>(1, kElementsAThread / stride), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (size_t p = 0; p < grads.size(); ++p) {
        Out* to = x + m * stride + static_cast<int64_t>(p) * width;
        if (p < turned)
          turn(grads[p] + m * width, to, s.heads, s.half, cos + m * s.half, sin + m * s.half, T(-1));
        else
          copy(grads[p] + m * width, to, width);
      }
  });
}

std::vector<Tensor> heads_forward(const Tensor& x_, const Tensor& cos, const Tensor& sin, int64_t heads, int64_t parts, int64_t turned) {
  TORCH_CHECK(x_.dim() == 2 && parts > 0 && x_.size(1) % parts == 0, "x is ", x_.sizes(), ", to be split in ", parts);
  const Tensor x = x_.contiguous();
  const bool narrow = x.scalar_type() == at::kBFloat16;
  TORCH_CHECK(cos.scalar_type() == sin.scalar_type() && cos.scalar_type() == (narrow ? at::kFloat : x.scalar_type()), "the angles' dtype");
  const Sizes sizes = check(x.size(0), x.size(1) / parts, cos, sin, heads);
  std::vector<Tensor> outs;
  for (int64_t p = 0; p < parts; ++p) outs.push_back(at::empty({sizes.rows, heads, 2 * sizes.half}, cos.options()));
  AT_DISPATCH_FLOATING_TYPES(cos.scalar_type(), "heads_forward", [&] {
    std::vector<scalar_t*> to;
    for (const Tensor& out : outs) to.push_back(out.mutable_data_ptr<scalar_t>());
    const auto *c = cos.const_data_ptr<scalar_t>(), *s = sin.const_data_ptr<scalar_t>();
    if constexpr (std::is_same_v<scalar_t, float>)
      if (narrow) return split(reinterpret_cast<const Half*>(x.const_data_ptr()), to, c, s, sizes, turned);
    split(x.const_data_ptr<scalar_t>(), to, c, s, sizes, turned);
  });
  return outs;
}

Tensor heads_backward(at::TensorList grads_, const Tensor& cos, const Tensor& sin, int64_t turned, at::ScalarType dtype) {
  TORCH_CHECK(!grads_.empty(), "there are no gradients");
  std::vector<Tensor> grads;
  for (const Tensor& grad : grads_) {
    TORCH_CHECK(grad.dim() == 3 && grad.sizes() == grads_[0].sizes() && grad.scalar_type() == cos.scalar_type(), "a gradient is ", grad.sizes());
    grads.push_back(grad.contiguous());
  }
  const bool narrow = dtype == at::kBFloat16;
  TORCH_CHECK(cos.scalar_type() == (narrow ? at::kFloat : dtype), "the angles' dtype");
  const Sizes sizes = check(grads[0].size(0), grads[0].size(1) * grads[0].size(2), cos, sin, grads[0].size(1));
  const Tensor x = at::empty({sizes.rows, static_cast<int64_t>(grads.size()) * sizes.width()}, cos.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES(cos.scalar_type(), "heads_backward", [&] {
    std::vector<const scalar_t*> from;
    for (const Tensor& grad : grads) from.push_back(grad.const_data_ptr<scalar_t>());
    const auto *c = cos.const_data_ptr<scalar_t>(), *s = sin.const_data_ptr<scalar_t>();
    if constexpr (std::is_same_v<scalar_t, float>)
      if (narrow) return join(from, reinterpret_cast<Half*>(x.mutable_data_ptr()), c, s, sizes, turned);
    join(from, x.mutable_data_ptr<scalar_t>(), c, s, sizes, turned);
  });
  return x;
}

// Shapes only, for tracing.
std::vector<Tensor> forward_shapes(const Tensor& x, const Tensor& cos, const Tensor&, int64_t heads, int64_t parts, int64_t) {
  std::vector<Tensor> outs;
  for (int64_t p = 0; p < parts; ++p)
    outs.push_back(at::empty_symint({x.sym_size(0), c10::SymInt(heads), cos.sym_size(-1) * 2}, cos.options()));
  return outs;
}

Tensor backward_shapes(at::TensorList grads, const Tensor& cos, const Tensor&, int64_t, at::ScalarType dtype) {
  const c10::SymInt width = grads[0].sym_size(1) * grads[0].sym_size(2) * static_cast<int64_t>(grads.size());
  return at::empty_symint({grads[0].sym_size(0), width}, cos.options().dtype(dtype));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) {
  m.def("heads_forward(Tensor x, Tensor cos, Tensor sin, int heads, int parts, int turned) -> Tensor[]");
  m.def("heads_backward(Tensor[] grads, Tensor cos, Tensor sin, int turned, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(tracformer, CPU, m) {
  m.impl("heads_forward", heads_forward);
  m.impl("heads_backward", heads_backward);
}

TORCH_LIBRARY_IMPL(tracformer, Meta, m) {
  m.impl("heads_forward", forward_shapes);
  m.impl("heads_backward", backward_shapes);
}

}  // namespace tracformer
