// The parts of a layer between its products, for single rows: normalisation, GELU, rotary angles,
// attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pack.h"
#include "simd.h"

namespace tracformer {

constexpr float kNormEpsilon = 1e-5f;  // PyTorch's default

struct Norm {
  const float *weight, *bias;  // (d)
};

// Columns from .. to-1 of LayerNorm(x) for x of d elements.
inline void normalise(const float* x, int64_t d, const Norm& norm, int64_t from, int64_t to, float* out) {
  constexpr int L = kLanes<float>;
  Vector<float> sums{};
  int64_t i = 0;
  for (; i + L <= d; i += L) sums += load(x + i);
  float mean = sum_of_lanes<float>(sums);
  for (; i < d; ++i) mean += x[i];
  mean /= static_cast<float>(d);
  Vector<float> squares{};
  for (i = 0; i + L <= d; i += L) {
    const Vector<float> centred = load(x + i) - mean;
    squares += centred * centred;
  }
  float variance = sum_of_lanes<float>(squares);
  for (; i < d; ++i) variance += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / std::sqrt(variance / static_cast<float>(d) + kNormEpsilon);
  for (i = from; i < to; ++i) out[i] = (x[i] - mean) * scale * norm.weight[i] + norm.bias[i];
}

// GELU: x Phi(x) = max(x, 0) - |x| / 2 erfc(|x| / sqrt 2), with Abramowitz and Stegun's 7.1.26 for
// erfc, whose error is at most 1.5e-7.
inline Vector<float> gelu(Vector<float> x) {
  const Vector<float> zero{}, size = x < zero ? -x : x, z = size * 0.70710678118654752f, t = 1.0f / (1.0f + 0.3275911f * z);
  const Vector<float> series =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * broadcast<float>(1.061405429f)))));
  return (x > zero ? x : zero) - 0.5f * size * series * exponential<float>(-z * z);
}

inline void gelu(float* x, int64_t count) {
  constexpr int L = kLanes<float>;
  int64_t i = 0;
  for (; i + L <= count; i += L) store(x + i, gelu(load(x + i)));
  float rest[L] = {};
  std::copy_n(x + i, count - i, rest);
  store(rest, gelu(load(rest)));
  std::copy_n(rest, count - i, x + i);
}

// Rotates the pairs (x_i, x_{i + D/2}) of one head by the angles of its position; cos, sin are
// (D/2).
inline void rotate(const float* from, float* to, int64_t D, const float* cos, const float* sin) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = from[i], b = from[i + half];
    to[i] = a * cos[i] - b * sin[i];
    to[i + half] = b * cos[i] + a * sin[i];
  }
}

// Softmax attention of one head's query over the slots slot(0), .., slot(count-1), rows `width`
// apart; zero if count is zero. `scores` has room for `count` values and one more vector.
template <typename Slot>
void attend(const float* q, const float* keys, const float* values, int64_t width, int64_t D, int64_t count, const Slot& slot, float* out,
            float* scores) {
  std::fill_n(out, D, 0.0f);
  if (count == 0) return;
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  float highest = -std::numeric_limits<float>::infinity();
  for (int64_t k = 0; k < count; ++k) {
    scores[k] = dot(q, keys + slot(k) * width, D) * scale;
    highest = std::max(highest, scores[k]);
  }
  const float total = exponentiate(scores, count, highest);
  for (int64_t k = 0; k < count; ++k) add_scaled(values + slot(k) * width, scores[k], D, out);
  for (int64_t i = 0; i < D; ++i) out[i] /= total;
}

}  // namespace tracformer
