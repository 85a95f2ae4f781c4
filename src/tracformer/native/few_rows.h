// x W' for few rows x. Every weight is read once, in order, so the time is that of reading memory.
// No prefetch instructions: the processor prefetches a single stream itself, and they were measured
// to cost more than they gain.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pack.h"
#include "stored.h"

namespace tracformer {

constexpr int64_t kFewRows = 32;   // in one product
constexpr int64_t kAloneRows = 4;  // up to that, each row has its own sums along a row of weights
constexpr int kWidened = 64;       // weights of a row that are widened together, for several rows of x

// Rows n < Rows of x against one row of weights.
template <typename S, int Rows>
inline void dot_rows(const float* x, int64_t width, const S* weight, float* sums) {
  constexpr int L = kLanes<float>, Chains = Rows == 1 ? 4 : 2;
  Vector<float> sum[Rows][Chains] = {};
  int64_t k = 0;
  for (; k + Chains * L <= width; k += Chains * L) {
#pragma GCC unroll 4
    for (int c = 0; c < Chains; ++c) {
      const Vector<float> w = widened(weight + k + c * L);
#pragma GCC unroll 4
      for (int n = 0; n < Rows; ++n) sum[n][c] += w * load(x + n * width + k + c * L);
    }
  }
  for (; k + L <= width; k += L) {
    const Vector<float> w = widened(weight + k);
#pragma GCC unroll 4
    for (int n = 0; n < Rows; ++n) sum[n][0] += w * load(x + n * width + k);
  }
  for (int n = 0; n < Rows; ++n) {
    for (int c = 1; c < Chains; ++c) sum[n][0] += sum[n][c];
    sums[n] = sum_of_lanes<float>(sum[n][0]);
  }
  for (; k < width; ++k)
    for (int n = 0; n < Rows; ++n) sums[n] += widened_one(weight[k]) * x[n * width + k];
}

// Outputs from .. to-1 for at most kAloneRows rows; added to `out` if `add`.
template <typename S, int Rows>
void product_alone(const Matrix& m, const float* x, float* out, int64_t out_width, int64_t from, int64_t to, bool add) {
  for (int64_t o = from; o < to; ++o) {
    float sums[Rows];
    dot_rows<S, Rows>(x, m.width, m.row<S>(o), sums);
    for (int n = 0; n < Rows; ++n) {
      float& result = out[n * out_width + o];
      result = m.finished(sums[n], o) + (add ? result : 0.0f);
    }
  }
}

// Rows are transposed in whole vectors.
inline int64_t turned_rows(int64_t rows) { return padded<float>(rows); }

// Outputs o .. o+Block-1 of all rows at once: one weight multiplies V vectors of rows. `turned` is
// the transpose of the rows, (width, V vectors).
template <typename S, int Block, int V>
void product_block(const Matrix& m, const float* turned, int64_t rows, float* out, int64_t out_width, int64_t o, bool add) {
  constexpr int L = kLanes<float>;
  constexpr bool direct = std::is_same_v<S, float>;
  Vector<float> sum[Block][V] = {};
  alignas(64) float tile[direct ? 1 : Block][kWidened];
  for (int64_t start = 0; start < m.width; start += kWidened) {
    const int64_t some = std::min<int64_t>(kWidened, m.width - start);
    const float* weights[Block];
    for (int b = 0; b < Block; ++b) {
      const S* row = m.row<S>(o + b) + start;
      if constexpr (direct) {
        weights[b] = row;
        for (int64_t k = 0; k < some; k += L) __builtin_prefetch(m.row<S>(o + b + Block) + start + k);
      } else {
        weights[b] = tile[b];
        int64_t k = 0;
        for (; k + L <= some; k += L) store(tile[b] + k, widened(row + k));
        for (; k < some; ++k) tile[b][k] = widened_one(row[k]);
      }
    }
    const float* x = turned + start * V * L;
    for (int64_t k = 0; k < some; ++k, x += V * L) {
      Vector<float> column[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) column[v] = load(x + v * L);
#pragma GCC unroll 8
      for (int b = 0; b < Block; ++b) {
        const Vector<float> w = broadcast<float>(weights[b][k]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[b][v] += w * column[v];
      }
    }
  }
  alignas(64) float sums[Block][V * L];
  for (int b = 0; b < Block; ++b) {
    const float scale = m.scale ? m.scale[o + b] : 1.0f, bias = m.bias ? m.bias[o + b] : 0.0f;
    for (int v = 0; v < V; ++v) store(sums[b] + v * L, sum[b][v] * scale + bias);
  }
  for (int64_t n = 0; n < rows; ++n) {
    float* results = out + n * out_width + o;
#pragma GCC unroll 8
    for (int b = 0; b < Block; ++b) results[b] = sums[b][n] + (add ? results[b] : 0.0f);
  }
}

template <typename S, int V>
void product_together(const Matrix& m, const float* x, int64_t rows, float* out, int64_t out_width, int64_t from, int64_t to, bool add) {
  constexpr int Block = kVectorBytes == 64 ? 8 : V > 2 ? 2 : 4;  // sums and operands fit in registers
  int64_t o = from;
  for (; o + Block <= to; o += Block) product_block<S, Block, V>(m, x, rows, out, out_width, o, add);
  for (; o < to; ++o) product_block<S, 1, V>(m, x, rows, out, out_width, o, add);
}

// Calls work(count) with the count as a constant, from 1 to Most.
template <int Most, typename Work>
void each_count(int64_t count, const Work& work) {
  if (count == Most)
    work(std::integral_constant<int, Most>{});
  else if constexpr (Most > 1)
    each_count<Most - 1>(count, work);
}

template <typename S>
void product_of(const Matrix& m, const float* x, int64_t rows, float* out, int64_t out_width, int64_t from, int64_t to, bool add) {
  switch (rows) {
    case 1: return product_alone<S, 1>(m, x, out, out_width, from, to, add);
    case 2: return product_alone<S, 2>(m, x, out, out_width, from, to, add);
    case 3: return product_alone<S, 3>(m, x, out, out_width, from, to, add);
    case 4: return product_alone<S, 4>(m, x, out, out_width, from, to, add);
    default: break;
  }
  const auto vectors = turned_rows(rows) / kLanes<float>;
  const auto together = [&](auto count) { product_together<S, count>(m, x, rows, out, out_width, from, to, add); };
  each_count<kFewRows / kLanes<float>>(vectors, together);
}

// Outputs from .. to-1 of every row, (rows, out_width). x is (rows, width) for up to kAloneRows
// rows; above that it is transposed, (width, rows rounded up to vectors).
inline void product(const Matrix& m, const float* x, int64_t rows, float* out, int64_t out_width, int64_t from, int64_t to,
                    bool add = false) {
  switch (m.kind) {
    case Kind::kFloat32: return product_of<float>(m, x, rows, out, out_width, from, to, add);
    case Kind::kBfloat16: return product_of<uint16_t>(m, x, rows, out, out_width, from, to, add);
    case Kind::kInt8: return product_of<int8_t>(m, x, rows, out, out_width, from, to, add);
  }
}

// Transposes columns from .. to-1 of x (rows, width). Lanes after the last row are never used.
inline void turn_columns(const float* x, int64_t rows, int64_t width, int64_t from, int64_t to, float* turned) {
  pack_transposed(x + from, width, rows, to - from, turned + from * turned_rows(rows), turned_rows(rows));
}

}  // namespace tracformer
