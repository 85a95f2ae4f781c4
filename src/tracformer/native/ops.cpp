// The attention operations that PyTorch calls: checks, allocation, threads.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <optional>

#include "few_keys.h"
#include "strided.h"
#include "window.h"

namespace tracformer {
namespace {

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;

// The last dimension must be dense; the others may have any stride.
Tensor dense_rows(const Tensor& x) { return x.size(-1) == 1 || x.stride(-1) == 1 ? x : x.contiguous(); }

Tensor contiguous_like(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

Tensor contiguous_lse(const Tensor& x) { return at::empty_symint(x.sym_sizes().slice(0, x.dim() - 1), x.options()); }

template <typename T>
Rows<const T> view(const Tensor& x) {
  const bool slots = x.dim() == 4;
  return {x.const_data_ptr<T>(), x.stride(0), slots ? x.stride(1) : 0, x.stride(slots ? 2 : 1)};
}

template <typename T>
Rows<T> mutable_view(const Tensor& x) {
  const bool slots = x.dim() == 4;
  return {x.mutable_data_ptr<T>(), x.stride(0), slots ? x.stride(1) : 0, x.stride(slots ? 2 : 1)};
}

// Threads take a few tasks at a time, so that none waits for a slow one. `start` makes the worker
// of a thread, with its scratch memory.
template <typename Start>
void run_tasks(int64_t tasks, const Start& start) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  if (threads == 0) return;
  const int64_t portion = std::max<int64_t>(1, tasks / (threads * 16));
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    auto worker = start();
    for (int64_t begin; (begin = next.fetch_add(portion)) < tasks;)
      for (int64_t task = begin; task < std::min(begin + portion, tasks); ++task) worker(task);
  });
}

void check_dtype(const Tensor& q, const Tensor& k, const Tensor& v) {
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && k.scalar_type() == v.scalar_type(), "q, k and v must have one dtype");
}

Shape strided_shape(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& rows, const Tensor& lengths, int64_t stride) {
  check_dtype(q, k, v);
  TORCH_CHECK(q.dim() == 3 && k.dim() == 4 && k.sizes() == v.sizes(), "q is ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  TORCH_CHECK(q.size(0) == rows.size(0) && q.size(1) == k.size(2) && q.size(2) == k.size(3), "q is ", q.sizes(), ", k ", k.sizes());
  TORCH_CHECK(rows.scalar_type() == at::kLong && lengths.scalar_type() == at::kLong, "rows and lengths must be int64");
  TORCH_CHECK(rows.is_contiguous() && lengths.is_contiguous(), "rows and lengths must be contiguous");
  const int64_t B = lengths.size(0), T = k.size(1);
  TORCH_CHECK(B > 0 && (k.size(0) == B || k.size(0) == 2 * B), "k has ", k.size(0), " rows for ", B, " sequences");
  TORCH_CHECK(T > 0 && stride > 0, "the length is ", T, ", the stride ", stride);
  for (int64_t n = 0; n < rows.size(0); ++n) {
    const int64_t row = rows.const_data_ptr<int64_t>()[n];
    TORCH_CHECK(row >= 0 && row < B * T, "row ", row, " is not among ", B, " sequences of length ", T);
  }
  return {B, T, k.size(0) / B, k.size(2), k.size(3), std::min(stride, T)};  // larger strides than T are the same: at most one key
}

Pair strided_forward(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& rows, const Tensor& lengths, int64_t stride) {
  const Shape shape = strided_shape(q_, k_, v_, rows, lengths, stride);
  const Tensor q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor out = contiguous_like(q), lse = contiguous_lse(q);
  const int64_t* ends = lengths.const_data_ptr<int64_t>();
  const Classes classes(shape, rows.const_data_ptr<int64_t>(), q.size(0), ends);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "strided_forward", [&] {
    const StridedForward<scalar_t> x{
        view<scalar_t>(q), view<scalar_t>(k), view<scalar_t>(v), mutable_view<scalar_t>(out), lse.mutable_data_ptr<scalar_t>()};
    run_tasks(shape.classes() * shape.heads, [&] {
      return [&, scratch = std::optional<ForwardScratch<scalar_t>>()](int64_t number) mutable {
        const Task<scalar_t> task(shape, classes, ends, number);
        if (few_keys(task)) return few_keys_forward(task, x);
        if (!scratch) scratch.emplace(shape, classes.most_keys);
        many_keys_forward(task, *scratch, x);
      };
    });
  });
  return {out, lse};
}

Triple strided_backward(const Tensor& grad_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& out, const Tensor& lse,
                        const Tensor& rows, const Tensor& lengths, int64_t stride) {
  const Shape shape = strided_shape(q_, k_, v_, rows, lengths, stride);
  TORCH_CHECK(grad_.sizes() == q_.sizes() && out.sizes() == q_.sizes(), "the output's gradient is ", grad_.sizes(), ", q ", q_.sizes());
  TORCH_CHECK(out.is_contiguous() && lse.is_contiguous(), "out and lse must be those of the forward");
  const Tensor grad = dense_rows(grad_), q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor grad_q = contiguous_like(q), grad_k = contiguous_like(k), grad_v = contiguous_like(v);
  const int64_t* ends = lengths.const_data_ptr<int64_t>();
  const Classes classes(shape, rows.const_data_ptr<int64_t>(), q.size(0), ends);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "strided_backward", [&] {
    const StridedBackward<scalar_t> x{
        view<scalar_t>(grad),           view<scalar_t>(q),              view<scalar_t>(k),
        view<scalar_t>(v),              view<scalar_t>(out),            lse.const_data_ptr<scalar_t>(),
        mutable_view<scalar_t>(grad_q), mutable_view<scalar_t>(grad_k), mutable_view<scalar_t>(grad_v)};
    run_tasks(shape.classes() * shape.heads, [&] {
      return [&, scratch = std::optional<BackwardScratch<scalar_t>>()](int64_t number) mutable {
        const Task<scalar_t> task(shape, classes, ends, number);
        clear_gradients(task, few_keys(task), x);
        if (few_keys(task)) return few_keys_backward(task, x);
        if (!scratch) scratch.emplace(shape, classes.most_queries);
        many_keys_backward(task, *scratch, x);
      };
    });
  });
  return {grad_q, grad_k, grad_v};
}

Window window_of(const Tensor& q, const Tensor& k, const Tensor& v, int64_t step, int64_t count, at::IntArrayRef extra) {
  check_dtype(q, k, v);
  TORCH_CHECK(q.dim() == 4 && q.sizes() == k.sizes() && q.sizes() == v.sizes(), "q is ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes());
  TORCH_CHECK(q.numel() > 0 && step > 0 && count > 0, "q is ", q.sizes(), ", the step ", step, ", the count ", count);
  const int64_t T = q.size(1);
  Window window{q.size(0), T, q.size(2), q.size(3), std::min(step, T), 0, extra.vec(), 1};
  std::sort(window.extra.begin(), window.extra.end());
  TORCH_CHECK(extra.empty() || window.extra[0] > 0, "distance ", window.extra[0], " is not behind the query");
  const int64_t longest = (T + window.step - 1) / window.step, wanted = 4 * at::get_num_threads();
  window.count = std::min(count, longest);
  const int64_t least = std::max(wanted / window.tasks(), longest / kLongestSegment);
  window.segments = std::clamp<int64_t>(least, 1, std::max<int64_t>(1, longest / kShortestSegment));
  return window;
}

Pair window_forward_op(const Tensor& q_, const Tensor& k_, const Tensor& v_, int64_t step, int64_t count, at::IntArrayRef extra) {
  const Window window = window_of(q_, k_, v_, step, count, extra);
  const Tensor q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor out = contiguous_like(q), lse = contiguous_lse(q);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "window_forward", [&] {
    const WindowForward<scalar_t> x{
        view<scalar_t>(q), view<scalar_t>(k), view<scalar_t>(v), mutable_view<scalar_t>(out), lse.mutable_data_ptr<scalar_t>()};
    run_tasks(window.tasks(), [&] {
      return [&, scratch = WindowScratch<scalar_t>(window)](int64_t number) mutable {
        window_forward(WindowTask<scalar_t>(window, number), scratch, x);
      };
    });
  });
  return {out, lse};
}

Triple window_backward_op(const Tensor& grad_, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& out, const Tensor& lse,
                          int64_t step, int64_t count, at::IntArrayRef extra) {
  const Window window = window_of(q_, k_, v_, step, count, extra);
  TORCH_CHECK(grad_.sizes() == q_.sizes() && out.sizes() == q_.sizes(), "the output's gradient is ", grad_.sizes(), ", q ", q_.sizes());
  TORCH_CHECK(out.is_contiguous() && lse.is_contiguous(), "out and lse must be those of the forward");
  const Tensor grad = dense_rows(grad_), q = dense_rows(q_), k = dense_rows(k_), v = dense_rows(v_);
  const Tensor grad_q = contiguous_like(q), grad_k = contiguous_like(k), grad_v = contiguous_like(v);
  AT_DISPATCH_FLOATING_TYPES(q.scalar_type(), "window_backward", [&] {
    const WindowBackward<scalar_t> x{
        view<scalar_t>(grad),           view<scalar_t>(q),              view<scalar_t>(k),
        view<scalar_t>(v),              view<scalar_t>(out),            lse.const_data_ptr<scalar_t>(),
        mutable_view<scalar_t>(grad_q), mutable_view<scalar_t>(grad_k), mutable_view<scalar_t>(grad_v)};
    run_tasks(window.tasks(), [&] {
      return [&, scratch = WindowScratch<scalar_t>(window)](int64_t number) mutable {
        window_backward(WindowTask<scalar_t>(window, number), scratch, x);
      };
    });
  });
  return {grad_q, grad_k, grad_v};
}

// Shapes only, for tracing.
template <typename... Rest>
Pair forward_shapes(const Tensor& q, const Tensor&, const Tensor&, Rest...) {
  return {contiguous_like(q), contiguous_lse(q)};
}

template <typename... Rest>
Triple backward_shapes(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor&, const Tensor&, Rest...) {
  return {contiguous_like(q), contiguous_like(k), contiguous_like(v)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) {
  m.def("strided_forward(Tensor q, Tensor k, Tensor v, Tensor rows, Tensor lengths, int stride) -> (Tensor, Tensor)");
  m.def(
      "strided_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor rows, Tensor lengths, int stride)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("window_forward(Tensor q, Tensor k, Tensor v, int step, int count, int[] extra) -> (Tensor, Tensor)");
  m.def(
      "window_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int step, int count, int[] extra)"
      " -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tracformer, CPU, m) {
  m.impl("strided_forward", strided_forward);
  m.impl("strided_backward", strided_backward);
  m.impl("window_forward", window_forward_op);
  m.impl("window_backward", window_backward_op);
}

TORCH_LIBRARY_IMPL(tracformer, Meta, m) {
  m.impl("strided_forward", forward_shapes<const Tensor&, const Tensor&, int64_t>);
  m.impl("strided_backward", backward_shapes<const Tensor&, const Tensor&, int64_t>);
  m.impl("window_forward", forward_shapes<int64_t, int64_t, at::IntArrayRef>);
  m.impl("window_backward", backward_shapes<int64_t, int64_t, at::IntArrayRef>);
}

}  // namespace tracformer
