// Scratch memory of one thread, and copies between scattered rows and dense panels for products.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "simd.h"

namespace tracformer {

// Rows of D adjacent elements, addressed by (row, head) or (row, slot, head).
template <typename T>
struct Rows {
  T* data;
  int64_t row, slot, head;  // strides in elements
  T* at(int64_t i, int64_t h) const { return data + i * row + h * head; }
  T* at(int64_t i, int64_t p, int64_t h) const { return data + i * row + p * slot + h * head; }
};

// Zeroed buffers that start on cache lines and live as long as this object.
template <typename T>
class Scratch {
 public:
  T* take(int64_t elements) {
    const size_t bytes = std::max<size_t>(elements, 1) * sizeof(T);
    pieces_.emplace_back(static_cast<T*>(::operator new(bytes, kLine)));
    std::memset(pieces_.back().get(), 0, bytes);
    return pieces_.back().get();
  }

 private:
  static constexpr std::align_val_t kLine{64};
  struct Free {
    void operator()(T* piece) const { ::operator delete(piece, kLine); }
  };
  std::vector<std::unique_ptr<T, Free>> pieces_;
};

// a0 b0 a1 b1 ..., from the lower or the upper halves.
template <typename T, bool Upper>
inline Vector<T> interleaved(Vector<T> a, Vector<T> b) {
  constexpr int lanes = kLanes<T>;
  const auto lane = lane_numbers<T>();
  return shuffled<T>(a, b, lane / 2 + (lane & 1) * lanes + (Upper ? lanes / 2 : 0));
}

// Transposes rows `stride` apart, (count, D), to (D, padded count): log2(lanes) rounds of
// interleaving transpose a square of vectors.
template <typename T>
void pack_transposed(const T* from, int64_t stride, int64_t count, int64_t D, T* to, int64_t to_row) {
  constexpr int lanes = kLanes<T>;
  const int64_t whole = D / lanes * lanes;
  for (int64_t j = 0; j < count; j += lanes) {
    const T* rows[lanes];
    for (int i = 0; i < lanes; ++i) rows[i] = from + std::min<int64_t>(j + i, count - 1) * stride;  // the last row is repeated as padding
    for (int64_t d = 0; d < whole; d += lanes) {
      Vector<T> x[lanes], y[lanes];
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) x[i] = load(rows[i] + d);
#pragma GCC unroll 4
      for (int round = 1; round < lanes; round *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < lanes / 2; ++i) {
          y[2 * i] = interleaved<T, false>(x[i], x[i + lanes / 2]);
          y[2 * i + 1] = interleaved<T, true>(x[i], x[i + lanes / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < lanes; ++i) x[i] = y[i];
      }
#pragma GCC unroll 16
      for (int i = 0; i < lanes; ++i) store(to + (d + i) * to_row + j, x[i]);
    }
    for (int64_t d = whole; d < D; ++d)
      for (int i = 0; i < lanes; ++i) to[d * to_row + j + i] = rows[i][d];
  }
}

// to = factor * from, D elements
template <typename T>
inline void copy_scaled(const T* from, T factor, int64_t D, T* to) {
  int64_t d = 0;
  for (; d + kLanes<T> <= D; d += kLanes<T>) store(to + d, load(from + d) * factor);
  for (; d < D; ++d) to[d] = from[d] * factor;
}

// to += factor * from
template <typename T>
inline void add_scaled(const T* from, T factor, int64_t D, T* to) {
  int64_t d = 0;
  for (; d + kLanes<T> <= D; d += kLanes<T>) store(to + d, load(to + d) + load(from + d) * factor);
  for (; d < D; ++d) to[d] += from[d] * factor;
}

template <typename T>
inline T dot(const T* a, const T* b, int64_t D) {
  Vector<T> sum{};
  int64_t d = 0;
  for (; d + kLanes<T> <= D; d += kLanes<T>) sum += load(a + d) * load(b + d);
  T total = sum_of_lanes<T>(sum);
  for (; d < D; ++d) total += a[d] * b[d];
  return total;
}

}  // namespace tracformer
