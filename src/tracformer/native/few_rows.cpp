// The linear layer for a handful of rows, as PyTorch sees it.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "few_rows.h"
#include "linear.h"

namespace tracformer {

using at::Tensor;

namespace {

void check(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), "x is ", x.sizes(), ", the weight ", weight.sizes());
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat, "x and the weight must be float32");
  TORCH_CHECK(weight.stride(1) == 1 || weight.size(1) == 1, "the weight's rows must be dense");
  TORCH_CHECK(x.size(0) <= kFewRows, "x has ", x.size(0), " rows; at most ", kFewRows);
  if (bias)
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->scalar_type() == at::kFloat && bias->is_contiguous(),
                "the bias is ", bias->sizes());
}

}  // namespace

Tensor few_rows(const Tensor& x_, const Tensor& weight, const std::optional<Tensor>& bias) {
  check(x_, weight, bias);
  const Tensor x = x_.contiguous();
  const int64_t rows = x.size(0), width = x.size(1), outputs = weight.size(0), stride = weight.stride(0);
  Tensor out = at::empty({rows, outputs}, x.options());
  if (rows == 0 || outputs == 0) return out;
  const float* in = x.const_data_ptr<float>();
  const float* w = weight.const_data_ptr<float>();
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  float* to = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(16, (int64_t{1} << 15) / width);  // under 128 KiB of weights a second thread does not pay
  if (rows <= kAloneRows) {
    at::parallel_for(0, outputs, grain, [&](int64_t from, int64_t until) {
      product_alone(in, rows, width, w, stride, b, to, outputs, from, until);
    });
  } else {
    const std::vector<float> packed = turned(in, rows, width);
    at::parallel_for(0, outputs, grain, [&](int64_t from, int64_t until) {
      product_together(packed.data(), rows, width, w, stride, b, to, outputs, from, until);
    });
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(tracformer, m) { m.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }

TORCH_LIBRARY_IMPL(tracformer, CPU, m) { m.impl("few_rows", few_rows); }

}  // namespace tracformer
