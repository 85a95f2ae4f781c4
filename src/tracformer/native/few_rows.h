// x W' for a handful of rows x: every weight is read once, in order, so that memory sets the pace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace tracformer {

constexpr int64_t kFewRows = 16;      // above that, a matrix product with packed weights pays
constexpr int64_t kAloneRows = 4;     // up to that, each row keeps its own sums along the weights' row
constexpr int64_t kAhead = 2048 / 4;  // weights between what is read and what is fetched

template <int Rows>
struct Sums {
  Vector<float> sum[Rows][2];
};

// Rows n < Rows of x against one row of weights.
template <int Rows>
inline void dot_rows(const float* x, int64_t stride, const float* weight, int64_t width, float* out, int64_t out_stride, float bias) {
  constexpr int L = kLanes<float>;
  Sums<Rows> sums{};
  int64_t k = 0;
  for (; k + 2 * L <= width; k += 2 * L) {
    __builtin_prefetch(weight + k + kAhead);
    __builtin_prefetch(weight + k + L + kAhead);
    const Vector<float> w0 = load(weight + k), w1 = load(weight + k + L);
#pragma GCC unroll 4
    for (int n = 0; n < Rows; ++n) {
      sums.sum[n][0] += w0 * load(x + n * stride + k);
      sums.sum[n][1] += w1 * load(x + n * stride + k + L);
    }
  }
  float rest[Rows] = {};
  for (; k < width; ++k)
    for (int n = 0; n < Rows; ++n) rest[n] += weight[k] * x[n * stride + k];
  for (int n = 0; n < Rows; ++n) out[n * out_stride] = sum_of_lanes<float>(sums.sum[n][0] + sums.sum[n][1]) + rest[n] + bias;
}

// Columns of outputs from .. to-1, for at most kAloneRows rows.
inline void product_alone(const float* x, int64_t rows, int64_t width, const float* weight, int64_t weight_stride, const float* bias,
                          float* out, int64_t out_width, int64_t from, int64_t to) {
  for (int64_t o = from; o < to; ++o) {
    const float* w = weight + o * weight_stride;
    const float b = bias ? bias[o] : 0.0f;
    switch (rows) {
      case 1: dot_rows<1>(x, width, w, width, out + o, out_width, b); break;
      case 2: dot_rows<2>(x, width, w, width, out + o, out_width, b); break;
      case 3: dot_rows<3>(x, width, w, width, out + o, out_width, b); break;
      default: dot_rows<4>(x, width, w, width, out + o, out_width, b);
    }
  }
}

// x turned so that a vector holds one coordinate of all rows: (width, kFewRows), zero beyond the last row.
inline std::vector<float> turned(const float* x, int64_t rows, int64_t width) {
  std::vector<float> packed(width * kFewRows, 0.0f);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t k = 0; k < width; ++k) packed[k * kFewRows + n] = x[n * width + k];
  return packed;
}

// Outputs o .. o+Block-1 of all rows at once: one weight is spread over a vector of rows.
template <int Block>
inline void product_block(const float* packed, int64_t rows, int64_t width, const float* weight, int64_t weight_stride, const float* bias,
                          float* out, int64_t out_width) {
  constexpr int V = kFewRows / kLanes<float>;
  Vector<float> sum[Block][V] = {};
  for (int64_t k = 0; k < width; ++k) {
    if (k % kLanes<float> == 0)
      for (int o = 0; o < Block; ++o) __builtin_prefetch(weight + (o + Block) * weight_stride + k);
    Vector<float> x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(packed + k * kFewRows + v * kLanes<float>);
#pragma GCC unroll 8
    for (int o = 0; o < Block; ++o) {
      const Vector<float> w = broadcast<float>(weight[o * weight_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[o][v] += w * x[v];
    }
  }
  for (int o = 0; o < Block; ++o)
    for (int64_t n = 0; n < rows; ++n)
      out[n * out_width + o] = sum[o][n / kLanes<float>][n % kLanes<float>] + (bias ? bias[o] : 0.0f);
}

inline void product_together(const float* packed, int64_t rows, int64_t width, const float* weight, int64_t weight_stride,
                             const float* bias, float* out, int64_t out_width, int64_t from, int64_t to) {
  constexpr int Block = kVectorBytes == 64 ? 8 : 4;
  int64_t o = from;
  for (; o + Block <= to; o += Block)
    product_block<Block>(packed, rows, width, weight + o * weight_stride, weight_stride, bias ? bias + o : nullptr, out + o, out_width);
  for (; o < to; ++o)
    product_block<1>(packed, rows, width, weight + o * weight_stride, weight_stride, bias ? bias + o : nullptr, out + o, out_width);
}

}  // namespace tracformer
