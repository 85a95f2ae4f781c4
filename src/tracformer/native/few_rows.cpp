// The operation `few_rows`: a linear layer for few rows.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>

#include "few_rows.h"
#include "matrix.h"
#include "team.h"

namespace tracformer {
namespace {

using at::Tensor;

Tensor few_rows(const Tensor& x_, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias) {
  TORCH_CHECK(x_.dim() == 2 && x_.scalar_type() == at::kFloat && x_.size(0) <= kFewRows, "x is ", x_.scalar_type(), " ", x_.sizes(),
              "; it must be float32 and have at most ", kFewRows, " rows");
  const Matrix m = matrix_of(weight, scale, bias);
  TORCH_CHECK(x_.size(1) == m.width, "x is ", x_.sizes(), ", the weight ", weight.sizes());
  const Tensor x = x_.contiguous();
  const int64_t rows = x.size(0);
  Tensor out = at::empty({rows, m.outputs}, x.options());
  if (rows == 0 || m.outputs == 0) return out;
  Scratch<float> memory;
  const float* operand = x.const_data_ptr<float>();
  if (rows > kAloneRows) {
    float* turned = memory.take(m.width * turned_rows(rows));
    turn_columns(operand, rows, m.width, 0, m.width, turned);
    operand = turned;
  }
  float* to = out.mutable_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(16, (int64_t{1} << 15) / std::max<int64_t>(1, m.width));  // smaller parts are not worth a thread
  const int64_t portions = std::max<int64_t>(1, m.outputs / grain);
  together(portions, 1, [&](Member me) {
    me.stage(m.outputs, 16, portions, [&](int64_t from, int64_t until) { product(m, operand, rows, to, m.outputs, from, until); });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) { m.def("few_rows(Tensor x, Tensor weight, Tensor? scale, Tensor? bias) -> Tensor"); }

TORCH_LIBRARY_IMPL(tracformer, CPU, m) { m.impl("few_rows", few_rows); }

}  // namespace tracformer
