// Small matrix products with operands in cache: a block of sums stays in registers over the whole
// inner dimension.
#pragma once

#include "simd.h"

namespace tracformer {

// C (M, N vectors) = or += A (M, depth) B (depth, N vectors). A has any strides, so that a
// transpose needs no copy.
template <typename T, int M, int N>
inline void block_product(
    int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row, T* c, int64_t c_row, bool add) {
  constexpr int lanes = kLanes<T>;
  Vector<T> sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[i][j] = add ? load(c + i * c_row + j * lanes) : Vector<T>{};
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = load(b + k * b_row + j * lanes);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Vector<T> factor = broadcast(a[i * a_row + k * a_column]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[i][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(c + i * c_row + j * lanes, sums[i][j]);
}

template <typename T, int N, typename... Arguments>
inline void rows_product(int64_t rows, Arguments... arguments) {
  static_assert(kBlockRows == 6);
  switch (rows) {
    case 1: return block_product<T, 1, N>(arguments...);
    case 2: return block_product<T, 2, N>(arguments...);
    case 3: return block_product<T, 3, N>(arguments...);
    case 4: return block_product<T, 4, N>(arguments...);
    case 5: return block_product<T, 5, N>(arguments...);
    default: return block_product<T, 6, N>(arguments...);
  }
}

// The same for at most kBlockRows rows of C and any number of columns, rounded up to whole vectors.
template <typename T>
void product(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row, int64_t a_column, const T* b, int64_t b_row, T* c,
             int64_t c_row, bool add) {
  constexpr int lanes = kLanes<T>;
  int64_t vectors = (columns + lanes - 1) / lanes;
  for (; vectors >= kBlockVectors; vectors -= kBlockVectors, b += kBlockVectors * lanes, c += kBlockVectors * lanes)
    rows_product<T, kBlockVectors>(rows, depth, a, a_row, a_column, b, b_row, c, c_row, add);
  if (kBlockVectors > 2 && vectors == 3) rows_product<T, 3>(rows, depth, a, a_row, a_column, b, b_row, c, c_row, add);
  if (kBlockVectors > 2 && vectors == 2) rows_product<T, 2>(rows, depth, a, a_row, a_column, b, b_row, c, c_row, add);
  if (vectors == 1) rows_product<T, 1>(rows, depth, a, a_row, a_column, b, b_row, c, c_row, add);
}

}  // namespace tracformer
