// From checked tensors to the plain pointers that products read.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "stored.h"

namespace tracformer {

inline Kind kind_of(const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kFloat: return Kind::kFloat32;
    case at::kBFloat16: return Kind::kBfloat16;
    case at::kChar: return Kind::kInt8;
    default: TORCH_CHECK(false, "the weight is ", weight.scalar_type(), "; it must be float32, bfloat16 or int8");
  }
}

inline const float* floats(const at::Tensor& x, int64_t count) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() == count, "a tensor is ", x.scalar_type(), " ", x.sizes(),
              "; it must be dense float32 with ", count, " elements");
  return x.const_data_ptr<float>();
}

// weight: (outputs, width), its rows dense; scale and bias: (outputs)
inline Matrix matrix_of(const at::Tensor& weight, const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && (weight.stride(1) == 1 || weight.size(1) == 1), "the weight is ", weight.sizes(),
              "; it must have two dimensions and dense rows");
  TORCH_CHECK((kind_of(weight) == Kind::kInt8) == scale.has_value(), "int8 weights have scales, and no others");
  const int64_t outputs = weight.size(0);
  return {kind_of(weight),  weight.const_data_ptr(),           outputs, weight.size(1), weight.stride(0), scale ? floats(*scale, outputs) : nullptr,
          bias ? floats(*bias, outputs) : nullptr};
}

}  // namespace tracformer
