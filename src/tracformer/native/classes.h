// The independent tasks of the strided decoder attention: one residue class of queries, one head.
//
// Queries of sequence b with t mod s = r read two key classes: slots t-1, t-1-s, ... of the forward
// reading, and u-1, u-1-s, ... of the mirrored one, where u = length-1-t mirrors t. No other r of
// the same b uses these slots. So a task (b, r, head) owns its queries, its keys and all their
// gradients, and tasks run in any order, on any thread, without a lock.
//
// Within a class, key j is on slot first + j * s and a query reads keys 0 .. count-1: causal
// attention over sequences of length T / s.
#pragma once

#include <cmath>
#include <vector>

#include "pack.h"

namespace tracformer {

struct Shape {
  int64_t batch, length, readings, heads, size, stride;
  int64_t classes() const { return batch * stride; }
};

// The queries of each class, and the number of keys of each reading that each query reads.
struct Classes {
  std::vector<int64_t> start;     // (B * s + 1) where a class begins in `query`
  std::vector<int64_t> query;     // (N) rows of q, class by class, in the caller's order within each
  std::vector<int64_t> count[2];  // (N) number of keys, in the order of `query`
  int64_t most_queries = 0, most_keys = 0;

  Classes(const Shape& shape, const int64_t* rows, int64_t N, const int64_t* lengths) : start(shape.classes() + 1), query(N) {
    const int64_t T = shape.length, s = shape.stride;
    const auto class_of = [&](int64_t n) { return rows[n] / T * s + rows[n] % T % s; };
    for (int64_t n = 0; n < N; ++n) ++start[class_of(n) + 1];
    for (int64_t c = 0; c < shape.classes(); ++c) {
      most_queries = std::max(most_queries, start[c + 1]);
      start[c + 1] += start[c];
    }
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (auto& counts : count) counts.resize(N);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t place = next[class_of(n)]++, t = rows[n] % T, u = lengths[rows[n] / T] - 1 - t;
      query[place] = n;
      const bool inside = u >= 0;  // a query in the padding reads nothing
      count[0][place] = inside ? (t + s - 1) / s : 0;
      count[1][place] = inside && shape.readings == 2 ? (u + s - 1) / s : 0;
      most_keys = std::max({most_keys, count[0][place], count[1][place]});
    }
  }
};

// The place of the keys of one class in one reading.
struct KeyClass {
  int64_t row, first, total;  // row of k and v; slot of key 0; keys up to the padded length
  int64_t most = 0;           // keys that at least one query reads

  KeyClass(const Shape& shape, int64_t b, int64_t r, int64_t reading, int64_t length) : row(reading * shape.batch + b) {
    const int64_t s = shape.stride, before = reading == 0 ? r - 1 : length - 2 - r;
    first = ((before % s) + s) % s;
    total = (shape.length - first + s - 1) / s;
  }
};

template <typename T>
struct Task {
  const Shape& shape;
  const Classes& classes;
  int64_t b, r, head;
  int64_t begin, queries;
  KeyClass keys[2];
  T scale;

  Task(const Shape& shape, const Classes& classes, const int64_t* lengths, int64_t number)
      : shape(shape),
        classes(classes),
        b(number / shape.heads / shape.stride),
        r(number / shape.heads % shape.stride),
        head(number % shape.heads),
        begin(classes.start[number / shape.heads]),
        queries(classes.start[number / shape.heads + 1] - begin),
        keys{{shape, b, r, 0, lengths[b]}, {shape, b, r, 1, lengths[b]}},
        scale(static_cast<T>(1 / std::sqrt(static_cast<double>(shape.size)))) {
    for (int64_t reading = 0; reading < shape.readings; ++reading)
      for (int64_t i = 0; i < queries; ++i) keys[reading].most = std::max(keys[reading].most, count(reading, i));
  }
  int64_t query(int64_t i) const { return classes.query[begin + i]; }
  int64_t count(int64_t reading, int64_t i) const { return classes.count[reading][begin + i]; }
  template <typename U>
  U* slot(const Rows<U>& x, int64_t reading, int64_t key) const {
    return x.at(keys[reading].row, keys[reading].first + key * shape.stride, head);
  }
};

// Inputs and outputs of the forward pass.
template <typename T>
struct StridedForward {
  Rows<const T> q, k, v;  // (N, H, D), (rows, T, H, D), (rows, T, H, D)
  Rows<T> out;            // (N, H, D)
  T* lse;                 // (N, H); zero for a query without keys
};

// Inputs and outputs of the backward pass.
template <typename T>
struct StridedBackward {
  Rows<const T> grad, q, k, v, out;
  const T* lse;
  Rows<T> grad_q, grad_k, grad_v;
};

// Sets the gradients of keys without queries to zero, so that every slot of the class has one; with
// `all`, those of the first `most` keys too.
template <typename T>
void clear_gradients(const Task<T>& task, bool all, const StridedBackward<T>& x) {
  for (int64_t reading = 0; reading < task.shape.readings; ++reading)
    for (int64_t j = all ? 0 : task.keys[reading].most; j < task.keys[reading].total; ++j) {
      std::fill_n(task.slot(x.grad_k, reading, j), task.shape.size, T{0});
      std::fill_n(task.slot(x.grad_v, reading, j), task.shape.size, T{0});
    }
}

}  // namespace tracformer
