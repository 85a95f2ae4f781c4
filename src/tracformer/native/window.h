// Multi-scope encoder attention: a sliding window over one residue class and head.
//
// Positions that differ by multiples of `step` form a class, in which query i reads keys i-count+1
// .. i. A tile of `rows` queries reads rows + count - 1 keys. Let the first of them be column 0 of
// the score buffer: then row i reads columns i .. i+count-1, a band, and products run along it, six
// rows at a time. Keys off the grid (`extra` distances) are in other classes and are processed
// singly.
//
// A task is a segment of a class. It owns its queries and the gradients of its keys. For the latter
// it also recomputes the count-1 queries after its end, and the queries that read its keys off the
// grid, so that no two tasks write to the same place.
#pragma once

#include <cmath>
#include <vector>

#include "pack.h"
#include "product.h"

namespace tracformer {

constexpr int64_t kWindowTile = 96;        // queries
constexpr int64_t kShortestSegment = 256;  // queries: shorter segments recompute too much at their ends
// Queries. The heads of a segment follow one another, while its pages are still in the TLB: this is
// a third faster at T = 32768.
constexpr int64_t kLongestSegment = 512;

struct Window {
  int64_t rows, length, heads, size, step, count;
  std::vector<int64_t> extra;
  int64_t segments;  // of each class
  int64_t tasks() const { return rows * step * segments * heads; }
  int64_t width() const { return kWindowTile + count + kBlockRows + 2 * (kVectorBytes / 4); }  // columns of a score row, padded
};

template <typename T>
struct WindowTask {
  const Window& window;
  int64_t head, row, first_slot;
  int64_t n, begin, end;  // the class's length; the segment
  T scale;

  WindowTask(const Window& window, int64_t number) : window(window), head(number % window.heads) {
    number /= window.heads;
    const int64_t segment = number % window.segments;
    number /= window.segments;
    first_slot = number % window.step;
    row = number / window.step;
    n = (window.length - first_slot + window.step - 1) / window.step;
    const int64_t each = (n + window.segments - 1) / window.segments;
    begin = std::min(segment * each, n), end = std::min(begin + each, n);
    scale = static_cast<T>(1 / std::sqrt(static_cast<double>(window.size)));
  }
  int64_t position(int64_t i) const { return first_slot + i * window.step; }
  template <typename U>
  U* at(const Rows<U>& x, int64_t i) const { return x.at(row, position(i), head); }
  template <typename U>
  U* at_position(const Rows<U>& x, int64_t t) const { return x.at(row, t, head); }
  int64_t lse_at(int64_t t) const { return (row * window.length + t) * window.heads + head; }
};

// One tile of queries of a task: its columns in the score buffer, and those of a block of rows.
struct Band {
  int64_t start, rows, count;  // first query, number of queries, keys of each
  int64_t first;               // key of column 0; negative where the class begins within the tile's reach
  int64_t missing;             // columns before key 0
  Band(int64_t start, int64_t rows, int64_t count)
      : start(start), rows(rows), count(count), first(start - count + 1), missing(std::max<int64_t>(0, -first)) {}
  int64_t keys() const { return rows + count - 1 - missing; }
  int64_t from(int64_t row) const { return std::max(row, missing); }  // columns that a row reads: from .. row + count - 1
  template <typename Work>
  void row_blocks(const Work& work) const {  // work(row, rows, first column, columns)
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      const int64_t some = std::min<int64_t>(kBlockRows, rows - i);
      work(i, some, from(i), i + some - 1 + count - from(i));
    }
  }
};

template <typename T>
struct WindowScratch {
  int64_t D, width;
  Scratch<T> memory;
  T *keys_across, *values_across;  // (D, width)
  T *keys, *values;                // (width, padded D), by column
  T *key_grads, *value_grads;      // (width, padded D), by column
  T *queries, *slopes, *sums;      // (kWindowTile, padded D) scaled queries; gradient of the output; a result
  T *weights, *score_slopes;       // (kWindowTile, width)
  T *totals, *extra;               // (kWindowTile) sums of weights; (extra) scores of one query

  explicit WindowScratch(const Window& window) : D(padded<T>(window.size)), width(padded<T>(window.width())) {
    for (T** panel : {&keys_across, &values_across, &keys, &values, &key_grads, &value_grads}) *panel = memory.take(width * D);
    for (T** tile : {&queries, &slopes, &sums}) *tile = memory.take(kWindowTile * D);
    for (T** tile : {&weights, &score_slopes}) *tile = memory.take(kWindowTile * width);
    totals = memory.take(kWindowTile), extra = memory.take(window.extra.size());
  }
};

template <typename T>
void copy_rows(const T* from, int64_t stride, int64_t count, int64_t size, T* to, int64_t D) {
  for (int64_t j = 0; j < count; ++j) std::copy_n(from + j * stride, size, to + j * D);
}

// Inputs and outputs of the forward pass, (rows, T, H, D) except lse, which is (rows, T, H).
template <typename T>
struct WindowForward {
  Rows<const T> q, k, v;
  Rows<T> out;
  T* lse;
};

template <typename T>
struct WindowBackward {
  Rows<const T> grad, q, k, v, out;
  const T* lse;
  Rows<T> grad_q, grad_k, grad_v;
};

template <typename T>
void window_forward(const WindowTask<T>& task, WindowScratch<T>& at, const WindowForward<T>& x) {
  constexpr int lanes = kLanes<T>;
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  const Window& window = task.window;
  const int64_t size = window.size, D = at.D, width = at.width;
  for (int64_t start = task.begin; start < task.end; start += kWindowTile) {
    const Band band(start, std::min(kWindowTile, task.end - start), window.count);
    const int64_t first = band.first + band.missing;
    pack_transposed(task.at(x.k, first), window.step * x.k.slot, band.keys(), size, at.keys_across + band.missing, width);
    copy_rows(task.at(x.v, first), window.step * x.v.slot, band.keys(), size, at.values + band.missing * D, D);
    for (int64_t i = 0; i < band.rows; ++i) copy_scaled(task.at(x.q, start + i), task.scale, size, at.queries + i * D);
    band.row_blocks([&](int64_t i, int64_t some, int64_t column, int64_t columns) {
      T* scores = at.weights + i * width + column;
      product(some, columns, size, at.queries + i * D, D, int64_t{1}, at.keys_across + column, width, scores, width, false);
    });
    band.row_blocks([&](int64_t i, int64_t some, int64_t column, int64_t columns) {
      for (int64_t row = i; row < i + some; ++row) {
        T* scores = at.weights + row * width + column;
        const int64_t from = band.from(row) - column, to = row + band.count - column, t = task.position(start + row);
        Vector<T> top = broadcast<T>(nothing);
        for (int64_t j = 0; j < columns; j += lanes) {
          const Vector<T> values = lanes_between<T>(load(scores + j), from - j, to - j, nothing);
          store(scores + j, values);
          top = values > top ? values : top;
        }
        T highest = highest_lane<T>(top);
        for (size_t e = 0; e < window.extra.size() && window.extra[e] <= t; ++e) {
          at.extra[e] = dot(task.at(x.q, start + row), task.at_position(x.k, t - window.extra[e]), size) * task.scale;
          highest = std::max(highest, at.extra[e]);
        }
        Vector<T> sum{};
        for (int64_t j = 0; j < columns; j += lanes) {
          const Vector<T> weights = lanes_between<T>(exponential<T>(load(scores + j) - highest), from - j, to - j, 0);
          store(scores + j, weights);
          sum += weights;
        }
        T total = sum_of_lanes<T>(sum);
        T* result = at.sums + row * D;
        std::fill_n(result, D, T{0});
        for (size_t e = 0; e < window.extra.size() && window.extra[e] <= t; ++e) {
          const T weight = std::exp(at.extra[e] - highest);
          total += weight;
          add_scaled(task.at_position(x.v, t - window.extra[e]), weight, size, result);
        }
        at.totals[row] = total;
        x.lse[task.lse_at(t)] = highest + std::log(total);
      }
      T* sums = at.sums + i * D;
      product(some, D, columns, at.weights + i * width + column, width, int64_t{1}, at.values + column * D, D, sums, D, true);
      for (int64_t row = i; row < i + some; ++row)
        copy_scaled(at.sums + row * D, 1 / at.totals[row], size, task.at(x.out, start + row));
    });
  }
}

// The weight of the pair (query at t, key at p), and the gradient of its score times the scale.
template <typename T>
inline void pair_slopes(const WindowTask<T>& task, const WindowBackward<T>& x, int64_t t, int64_t p, T* weight, T* score_slope) {
  const int64_t size = task.window.size;
  const T* slope = task.at_position(x.grad, t);
  *weight = std::exp(dot(task.at_position(x.q, t), task.at_position(x.k, p), size) * task.scale - x.lse[task.lse_at(t)]);
  const T along = dot(slope, task.at_position(x.v, p), size) - dot(slope, task.at_position(x.out, t), size);
  *score_slope = *weight * along * task.scale;
}

// Weights and score gradients of a tile, and the gradients of its queries.
template <typename T>
void window_tile_backward(const WindowTask<T>& task, WindowScratch<T>& at, const WindowBackward<T>& x, const Band& band) {
  constexpr int lanes = kLanes<T>;
  const int64_t size = task.window.size, D = at.D, width = at.width;
  band.row_blocks([&](int64_t i, int64_t some, int64_t column, int64_t columns) {
    T *weights = at.weights + i * width + column, *slopes = at.score_slopes + i * width + column;
    product(some, columns, size, at.queries + i * D, D, int64_t{1}, at.keys_across + column, width, weights, width, false);
    product(some, columns, size, at.slopes + i * D, D, int64_t{1}, at.values_across + column, width, slopes, width, false);
    for (int64_t row = i; row < i + some; ++row, weights += width, slopes += width) {
      const int64_t from = band.from(row) - column, to = row + band.count - column;
      const T lse = x.lse[task.lse_at(task.position(band.start + row))];
      const T delta = dot(at.slopes + row * D, task.at(x.out, band.start + row), size);
      for (int64_t j = 0; j < columns + kBlockRows; j += lanes) {  // blocks of keys read slightly past the band: zeros
        const Vector<T> w = lanes_between<T>(exponential<T>(load(weights + j) - lse), from - j, to - j, 0);
        store(weights + j, w);
        store(slopes + j, lanes_between<T>(w * (load(slopes + j) - delta), from - j, to - j, 0));
      }
    }
    if (band.start + i >= task.end) return;
    T* sums = at.sums + i * D;
    slopes = at.score_slopes + i * width + column;
    product(some, D, columns, slopes, width, int64_t{1}, at.keys + column * D, D, sums, D, false);
    for (int64_t row = i; row < i + some && band.start + row < task.end; ++row) {
      T* result = task.at(x.grad_q, band.start + row);
      copy_scaled(at.sums + row * D, task.scale, size, result);
      const int64_t t = task.position(band.start + row);
      for (const int64_t offset : task.window.extra) {
        if (offset > t) break;
        T weight, score_slope;
        pair_slopes(task, x, t, t - offset, &weight, &score_slope);
        add_scaled(task.at_position(x.k, t - offset), score_slope, size, result);
      }
    }
  });
}

// Writes the complete gradients of the first `columns` columns, if the segment owns their keys.
template <typename T>
void write_key_gradients(const WindowTask<T>& task, WindowScratch<T>& at, const WindowBackward<T>& x, int64_t first, int64_t columns) {
  const int64_t size = task.window.size, D = at.D;
  for (int64_t key = std::max(first, task.begin); key < std::min(first + columns, task.end); ++key) {
    T *grad_k = at.key_grads + (key - first) * D, *grad_v = at.value_grads + (key - first) * D;
    const int64_t p = task.position(key);
    for (const int64_t offset : task.window.extra) {
      if (p + offset >= task.window.length) break;
      T weight, score_slope;
      pair_slopes(task, x, p + offset, p, &weight, &score_slope);
      add_scaled(task.at_position(x.q, p + offset), score_slope, size, grad_k);
      add_scaled(task.at_position(x.grad, p + offset), weight, size, grad_v);
    }
    std::copy_n(grad_k, size, task.at(x.grad_k, key));
    std::copy_n(grad_v, size, task.at(x.grad_v, key));
  }
}

template <typename T>
void window_backward(const WindowTask<T>& task, WindowScratch<T>& at, const WindowBackward<T>& x) {
  const Window& window = task.window;
  const int64_t size = window.size, D = at.D, width = at.width, overlap = window.count - 1;
  for (T* grads : {at.key_grads, at.value_grads}) std::fill_n(grads, overlap * D, T{0});
  const int64_t last = std::min(task.end + overlap, task.n);  // end of the queries that read this segment's keys
  int64_t start = task.begin;
  while (start < last) {
    const Band band(start, std::min(kWindowTile, last - start), window.count);
    const int64_t first = band.first + band.missing;
    pack_transposed(task.at(x.k, first), window.step * x.k.slot, band.keys(), size, at.keys_across + band.missing, width);
    pack_transposed(task.at(x.v, first), window.step * x.v.slot, band.keys(), size, at.values_across + band.missing, width);
    copy_rows(task.at(x.k, first), window.step * x.k.slot, band.keys(), size, at.keys + band.missing * D, D);
    copy_rows(task.at(x.grad, start), window.step * x.grad.slot, band.rows, size, at.slopes, D);
    for (int64_t i = 0; i < band.rows; ++i) copy_scaled(task.at(x.q, start + i), task.scale, size, at.queries + i * D);
    window_tile_backward(task, at, x, band);
    for (T* grads : {at.key_grads, at.value_grads}) std::fill_n(grads + overlap * D, band.rows * D, T{0});
    const int64_t columns = band.rows + overlap;
    for (int64_t j = 0; j < columns; j += kBlockRows) {
      const int64_t some = std::min<int64_t>(kBlockRows, columns - j), key = band.first + j;
      if (key + some <= task.begin || key >= task.end) continue;
      const int64_t from = std::max<int64_t>(0, j - overlap), depth = std::min(band.rows, j + some) - from;  // queries that read these keys
      const int64_t corner = from * width + j;
      product(some, D, depth, at.score_slopes + corner, int64_t{1}, width, at.queries + from * D, D, at.key_grads + j * D, D, true);
      product(some, D, depth, at.weights + corner, int64_t{1}, width, at.slopes + from * D, D, at.value_grads + j * D, D, true);
    }
    write_key_gradients(task, at, x, band.first, band.rows);
    for (T* grads : {at.key_grads, at.value_grads})  // the last columns become the first of the next tile
      std::memmove(grads, grads + band.rows * D, overlap * D * sizeof(T));
    start += band.rows;
  }
  write_key_gradients(task, at, x, start - overlap, overlap);
}

}  // namespace tracformer
