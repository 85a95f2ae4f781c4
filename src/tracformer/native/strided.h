// Strided attention of a class with many keys: causal attention in dense panels, prefix and
// mirrored suffix in one softmax.
//
// Scores are computed for a tile of queries and a block of keys at a time. The forward pass goes
// tile by tile, with a running softmax over the blocks; the backward pass goes block by block, so
// that the gradients of a block are complete at its end.
#pragma once

#include "classes.h"
#include "product.h"

namespace tracformer {

constexpr int64_t kKeyBlock = 64;   // keys: a block of 64 x 64 floats is half of the L1 cache
constexpr int64_t kQueryTile = 48;  // queries

// The number of keys that query i reads in the block that begins at `start`.
template <typename T>
inline int64_t keys_within(const Task<T>& task, int64_t reading, int64_t i, int64_t start) {
  return std::clamp<int64_t>(task.count(reading, i) - start, 0, kKeyBlock);
}

template <typename T>
inline int64_t most_within(const Task<T>& task, int64_t reading, int64_t i, int64_t rows, int64_t start) {
  int64_t most = 0;
  for (int64_t j = i; j < i + rows; ++j) most = std::max(most, keys_within(task, reading, j, start));
  return most;
}

template <typename T>
struct ForwardScratch {
  int64_t D, blocks;
  Scratch<T> memory;
  T* keys[2];          // (blocks, D, kKeyBlock): transposed within each block
  T* values[2];        // (blocks * kKeyBlock, padded D)
  T *queries, *sums;   // (kQueryTile, padded D) scaled queries; weighted sums of values
  T* scores;           // (kQueryTile, kKeyBlock)
  T *highest, *total;  // (kQueryTile) maximum and sum of the softmax so far

  ForwardScratch(const Shape& shape, int64_t most_keys)
      : D(padded<T>(shape.size)), blocks((most_keys + kKeyBlock - 1) / kKeyBlock) {
    for (int64_t reading = 0; reading < shape.readings; ++reading) {
      keys[reading] = memory.take(blocks * kKeyBlock * D);
      values[reading] = memory.take(blocks * kKeyBlock * D);
    }
    queries = memory.take(kQueryTile * D), sums = memory.take(kQueryTile * D), scores = memory.take(kQueryTile * kKeyBlock);
    highest = memory.take(kQueryTile), total = memory.take(kQueryTile);
  }
};

// Adds a block of keys to a row's softmax: scores become weights relative to the highest score so
// far, and earlier sums are rescaled.
template <typename T>
inline void absorb(T* scores, int64_t keys, int64_t columns, T& highest, T& total, T* sums, int64_t D) {
  constexpr int lanes = kLanes<T>;
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  if (keys > 0) {
    Vector<T> top = broadcast<T>(nothing);
    for (int64_t j = 0; j < keys; j += lanes) {
      const Vector<T> x = first_lanes<T>(load(scores + j), keys - j, nothing);
      top = x > top ? x : top;
    }
    const T block = highest_lane<T>(top);
    if (block > highest) {
      if (total > 0) {
        const T shrink = std::exp(highest - block);
        total *= shrink;
        for (int64_t d = 0; d < D; d += lanes) store(sums + d, load(sums + d) * shrink);
      }
      highest = block;
    }
    total += exponentiate(scores, keys, highest);
  }
  for (int64_t j = padded<T>(keys); j < columns; j += lanes) store(scores + j, Vector<T>{});
}

template <typename T>
void many_keys_forward(const Task<T>& task, ForwardScratch<T>& at, const StridedForward<T>& x) {
  const int64_t size = task.shape.size, D = at.D;
  for (int64_t reading = 0; reading < task.shape.readings; ++reading) {
    const int64_t most = task.keys[reading].most, step = task.shape.stride;
    for (int64_t start = 0; start < most; start += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, most - start);
      pack_transposed(task.slot(x.k, reading, start), step * x.k.slot, keys, size, at.keys[reading] + start * D, kKeyBlock);
      for (int64_t j = start; j < start + keys; ++j) std::copy_n(task.slot(x.v, reading, j), size, at.values[reading] + j * D);
    }
  }
  for (int64_t tile = 0; tile < task.queries; tile += kQueryTile) {
    const int64_t rows = std::min(kQueryTile, task.queries - tile);
    for (int64_t i = 0; i < rows; ++i) copy_scaled(x.q.at(task.query(tile + i), task.head), task.scale, size, at.queries + i * D);
    std::fill_n(at.sums, rows * D, T{0});
    std::fill_n(at.highest, rows, -std::numeric_limits<T>::infinity());
    std::fill_n(at.total, rows, T{0});
    for (int64_t reading = 0; reading < task.shape.readings; ++reading) {
      const int64_t most = task.keys[reading].most;
      for (int64_t start = 0; start < most; start += kKeyBlock) {
        const auto row_blocks = [&](auto&& work) {  // six queries at a time, of those that read keys here
          for (int64_t i = 0; i < rows; i += kBlockRows) {
            const int64_t some = std::min<int64_t>(kBlockRows, rows - i), keys = most_within(task, reading, tile + i, some, start);
            if (keys > 0) work(i, some, keys);
          }
        };
        row_blocks([&](int64_t i, int64_t some, int64_t keys) {
          T* scores = at.scores + i * kKeyBlock;
          product(some, keys, size, at.queries + i * D, D, int64_t{1}, at.keys[reading] + start * D, kKeyBlock, scores, kKeyBlock, false);
          for (int64_t j = i; j < i + some; ++j, scores += kKeyBlock)
            absorb(scores, keys_within(task, reading, tile + j, start), padded<T>(keys), at.highest[j], at.total[j], at.sums + j * D, D);
        });
        row_blocks([&](int64_t i, int64_t some, int64_t keys) {
          const T *weights = at.scores + i * kKeyBlock, *values = at.values[reading] + start * D;
          product(some, D, keys, weights, kKeyBlock, int64_t{1}, values, D, at.sums + i * D, D, true);
        });
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t n = task.query(tile + i);
      const bool some = task.count(0, tile + i) + task.count(1, tile + i) > 0;
      copy_scaled(at.sums + i * D, some ? 1 / at.total[i] : T{0}, size, x.out.at(n, task.head));
      x.lse[n * task.shape.heads + task.head] = some ? at.highest[i] + std::log(at.total[i]) : T{0};
    }
  }
}

template <typename T>
struct BackwardScratch {
  int64_t D;
  Scratch<T> memory;
  T *queries, *slopes, *grads;     // (queries, padded D) scaled queries; gradient of the output; gradient of the queries
  T *lse, *delta;                  // (queries)
  T* keys;                         // (kKeyBlock, padded D)
  T *keys_across, *values_across;  // (D, kKeyBlock) transposed
  T *key_grads, *value_grads;      // (kKeyBlock, padded D)
  T *weights, *score_slopes;       // (kQueryTile, kKeyBlock)

  BackwardScratch(const Shape& shape, int64_t most_queries) : D(padded<T>(shape.size)) {
    for (T** panel : {&queries, &slopes, &grads}) *panel = memory.take(most_queries * D);
    for (T** column : {&lse, &delta}) *column = memory.take(most_queries);
    for (T** block : {&keys, &keys_across, &values_across, &key_grads, &value_grads}) *block = memory.take(kKeyBlock * D);
    for (T** tile : {&weights, &score_slopes}) *tile = memory.take(kQueryTile * kKeyBlock);
  }
};

// The gradients from one tile of queries and one block of keys.
template <typename T>
void tile_backward(const Task<T>& task, BackwardScratch<T>& at, int64_t reading, int64_t tile, int64_t start) {
  constexpr int lanes = kLanes<T>;
  const int64_t size = task.shape.size, D = at.D;
  int64_t first = tile, last = std::min(tile + kQueryTile, task.queries);  // the queries of the tile that read this block
  while (first < last && keys_within(task, reading, first, start) == 0) ++first;
  while (first < last && keys_within(task, reading, last - 1, start) == 0) --last;
  const int64_t all_keys = most_within(task, reading, first, last - first, start);
  for (int64_t i = first; i < last; i += kBlockRows) {
    const int64_t some = std::min<int64_t>(kBlockRows, last - i), keys = most_within(task, reading, i, some, start);
    T *weights = at.weights + (i - first) * kKeyBlock, *slopes = at.score_slopes + (i - first) * kKeyBlock;
    product(some, keys, size, at.queries + i * D, D, int64_t{1}, at.keys_across, kKeyBlock, weights, kKeyBlock, false);
    product(some, keys, size, at.slopes + i * D, D, int64_t{1}, at.values_across, kKeyBlock, slopes, kKeyBlock, false);
    for (int64_t row = 0; row < some; ++row) {
      const int64_t allowed = keys_within(task, reading, i + row, start);
      const T lse = at.lse[i + row], delta = at.delta[i + row];
      T *weight = weights + row * kKeyBlock, *slope = slopes + row * kKeyBlock;
      for (int64_t j = 0; j < padded<T>(all_keys); j += lanes) {
        Vector<T> w{}, s{};
        if (j < allowed) {
          w = first_lanes<T>(exponential<T>(load(weight + j) - lse), allowed - j, 0);
          s = first_lanes<T>(w * (load(slope + j) - delta), allowed - j, 0);
        }
        store(weight + j, w);
        store(slope + j, s);
      }
    }
    product(some, D, keys, slopes, kKeyBlock, int64_t{1}, at.keys, D, at.grads + i * D, D, true);
  }
  for (int64_t j = 0; j < all_keys; j += kBlockRows) {
    const int64_t some = std::min<int64_t>(kBlockRows, all_keys - j);
    int64_t from = first, to = last;  // the queries among them that read key j
    while (from < to && keys_within(task, reading, from, start) <= j) ++from;
    while (from < to && keys_within(task, reading, to - 1, start) <= j) --to;
    const int64_t corner = (from - first) * kKeyBlock + j;
    product(some, D, to - from, at.score_slopes + corner, int64_t{1}, kKeyBlock, at.queries + from * D, D, at.key_grads + j * D, D, true);
    product(some, D, to - from, at.weights + corner, int64_t{1}, kKeyBlock, at.slopes + from * D, D, at.value_grads + j * D, D, true);
  }
}

template <typename T>
void many_keys_backward(const Task<T>& task, BackwardScratch<T>& at, const StridedBackward<T>& x) {
  const int64_t size = task.shape.size, D = at.D;
  for (int64_t i = 0; i < task.queries; ++i) {
    const int64_t n = task.query(i);
    copy_scaled(x.q.at(n, task.head), task.scale, size, at.queries + i * D);
    std::copy_n(x.grad.at(n, task.head), size, at.slopes + i * D);
    at.delta[i] = dot(x.grad.at(n, task.head), x.out.at(n, task.head), size);
    at.lse[i] = x.lse[n * task.shape.heads + task.head];
  }
  std::fill_n(at.grads, task.queries * D, T{0});
  for (int64_t reading = 0; reading < task.shape.readings; ++reading) {
    const int64_t most = task.keys[reading].most, step = task.shape.stride;
    for (int64_t start = 0; start < most; start += kKeyBlock) {
      const int64_t keys = std::min(kKeyBlock, most - start);
      pack_transposed(task.slot(x.k, reading, start), step * x.k.slot, keys, size, at.keys_across, kKeyBlock);
      pack_transposed(task.slot(x.v, reading, start), step * x.v.slot, keys, size, at.values_across, kKeyBlock);
      for (int64_t j = 0; j < keys; ++j) std::copy_n(task.slot(x.k, reading, start + j), size, at.keys + j * D);
      std::fill_n(at.key_grads, keys * D, T{0});
      std::fill_n(at.value_grads, keys * D, T{0});
      for (int64_t tile = 0; tile < task.queries; tile += kQueryTile) tile_backward(task, at, reading, tile, start);
      for (int64_t j = 0; j < keys; ++j) {
        std::copy_n(at.key_grads + j * D, size, task.slot(x.grad_k, reading, start + j));
        std::copy_n(at.value_grads + j * D, size, task.slot(x.grad_v, reading, start + j));
      }
    }
  }
  for (int64_t i = 0; i < task.queries; ++i) copy_scaled(at.grads + i * D, task.scale, size, x.grad_q.at(task.query(i), task.head));
}

}  // namespace tracformer
