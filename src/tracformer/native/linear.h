// x W' + b for at most kFewRows rows, see few_rows.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace tracformer {

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace tracformer
