// Strided attention of a class with few keys, as in the coarse layers: single dot products,
// directly from the tensors.
#pragma once

#include "classes.h"

namespace tracformer {

constexpr int64_t kFewKeys = 6;                    // keys of each reading; with more, panels are faster
constexpr int64_t kFewScores = 2 * kFewKeys + 16;  // a whole vector may be read at the last

template <typename T>
bool few_keys(const Task<T>& task) {
  return task.keys[0].most <= kFewKeys && task.keys[1].most <= kFewKeys;
}

// Writes the scores of query i and all its keys, forward reading first; returns their number.
template <typename T>
inline int64_t few_scores(const Task<T>& task, int64_t i, const T* q, const Rows<const T>& k, T* scores) {
  int64_t keys = 0;
  for (int64_t reading = 0; reading < task.shape.readings; ++reading)
    for (int64_t j = 0; j < task.count(reading, i); ++j) scores[keys++] = dot(q, task.slot(k, reading, j), task.shape.size) * task.scale;
  return keys;
}

template <typename T>
void few_keys_forward(const Task<T>& task, const StridedForward<T>& x) {
  const int64_t D = task.shape.size;
  for (int64_t i = 0; i < task.queries; ++i) {
    const int64_t n = task.query(i);
    T* result = x.out.at(n, task.head);
    T scores[kFewScores] = {};
    const int64_t keys = few_scores(task, i, x.q.at(n, task.head), x.k, scores);
    std::fill_n(result, D, T{0});
    if (keys == 0) {
      x.lse[n * task.shape.heads + task.head] = 0;
      continue;
    }
    const T highest = *std::max_element(scores, scores + keys);
    const T sum = exponentiate(scores, keys, highest);
    const T* weight = scores;
    for (int64_t reading = 0; reading < task.shape.readings; ++reading)
      for (int64_t j = 0; j < task.count(reading, i); ++j) add_scaled(task.slot(x.v, reading, j), *weight++ / sum, D, result);
    x.lse[n * task.shape.heads + task.head] = highest + std::log(sum);
  }
}

template <typename T>
void few_keys_backward(const Task<T>& task, const StridedBackward<T>& x) {
  const int64_t D = task.shape.size;
  for (int64_t i = 0; i < task.queries; ++i) {
    const int64_t n = task.query(i);
    const T *query = x.q.at(n, task.head), *slope = x.grad.at(n, task.head);
    T* result = x.grad_q.at(n, task.head);
    T scores[kFewScores] = {};
    const int64_t keys = few_scores(task, i, query, x.k, scores);
    std::fill_n(result, D, T{0});
    exponentiate(scores, keys, x.lse[n * task.shape.heads + task.head]);
    const T delta = dot(slope, x.out.at(n, task.head), D);
    const T* weight = scores;
    for (int64_t reading = 0; reading < task.shape.readings; ++reading)
      for (int64_t j = 0; j < task.count(reading, i); ++j, ++weight) {
        const T score_slope = *weight * (dot(slope, task.slot(x.v, reading, j), D) - delta) * task.scale;
        add_scaled(task.slot(x.k, reading, j), score_slope, D, result);
        add_scaled(query, score_slope, D, task.slot(x.grad_k, reading, j));
        add_scaled(slope, *weight, D, task.slot(x.grad_v, reading, j));
      }
  }
}

}  // namespace tracformer
