// One layer of one step of generation, for a handful of rows: everything between a layer's input and its output in one call.
// Float32. Rows are (sequence, position) pairs; caches are (B * slots, d), each token's heads side by side.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "few_rows.h"
#include "linear.h"

namespace tracformer {
namespace {

using at::Tensor;
using Weights = at::TensorList;

constexpr double kNormEpsilon = 1e-5;  // PyTorch's default

// LayerNorm of each row of x (N, d).
Tensor normalised(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  const int64_t N = x.size(0), d = x.size(1);
  Tensor out = at::empty_like(x);
  const float *from = x.const_data_ptr<float>(), *w = weight.const_data_ptr<float>(), *b = bias.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for (int64_t n = 0; n < N; ++n, from += d, to += d) {
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < d; ++i) sum += from[i];
    const double mean = sum / d;
    for (int64_t i = 0; i < d; ++i) squares += (from[i] - mean) * (from[i] - mean);
    const float scale = static_cast<float>(1.0 / std::sqrt(squares / d + kNormEpsilon)), centre = static_cast<float>(mean);
    for (int64_t i = 0; i < d; ++i) to[i] = (from[i] - centre) * scale * w[i] + b[i];
  }
  return out;
}

// The pair (x_i, x_{i + D/2}) of every head turned by its row's angles; cos and sin are (N, D/2).
void turn(const float* from, float* to, int64_t heads, int64_t D, const float* cos, const float* sin) {
  const int64_t half = D / 2;
  for (int64_t h = 0; h < heads; ++h, from += D, to += D)
    for (int64_t i = 0; i < half; ++i) {
      const float a = from[i], b = from[i + half];
      to[i] = a * cos[i] - b * sin[i];
      to[i + half] = b * cos[i] + a * sin[i];
    }
}

float dot(const float* a, const float* b, int64_t D) {
  constexpr int L = kLanes<float>;
  Vector<float> sum{};
  int64_t i = 0;
  for (; i + L <= D; i += L) sum += load(a + i) * load(b + i);
  float total = sum_of_lanes<float>(sum);
  for (; i < D; ++i) total += a[i] * b[i];
  return total;
}

// Softmax attention of one head's query over the slots that `slot(0..count-1)` names.
template <typename Slot>
void attend(const float* q, const float* keys, const float* values, int64_t width, int64_t D, int64_t count, const Slot& slot, float* out,
            std::vector<float>& scores) {
  scores.resize(count);
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  float highest = -INFINITY;
  for (int64_t k = 0; k < count; ++k) {
    scores[k] = dot(q, keys + slot(k) * width, D) * scale;
    highest = std::max(highest, scores[k]);
  }
  float total = 0.0f;
  for (int64_t i = 0; i < D; ++i) out[i] = 0.0f;
  for (int64_t k = 0; k < count; ++k) {
    const float weight = std::exp(scores[k] - highest);
    total += weight;
    const float* value = values + slot(k) * width;
    for (int64_t i = 0; i < D; ++i) out[i] += weight * value[i];
  }
  if (count > 0)
    for (int64_t i = 0; i < D; ++i) out[i] /= total;
}

// Each (row, head) on its own; count(n) and slot(n, k) say which slots row n reads. q and the result: (N, d)
template <typename Count, typename Slot>
Tensor attended(const Tensor& q, int64_t stride, const Tensor& keys, const Tensor& values, int64_t heads, const Count& count, const Slot& slot,
                int64_t N, int64_t d) {
  const int64_t D = d / heads;
  Tensor out = at::empty({N, d}, keys.options());
  const float *from = q.const_data_ptr<float>(), *k = keys.const_data_ptr<float>(), *v = values.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, N * heads, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> scores;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / heads, h = task % heads;
      attend(from + n * stride + h * D, k + h * D, v + h * D, d, D, count(n), [&](int64_t i) { return slot(n, i); }, to + n * d + h * D,
             scores);
    }
  });
  return out;
}

// x + out(mixed), then x + feed-forward(norm(x)). weights: out, norm, up, down, each a weight and a bias.
Tensor finished(const Tensor& x, const Tensor& mixed, Weights w) {
  Tensor y = few_rows(mixed, w[0], w[1]).add_(x);
  const Tensor inner = at::gelu(few_rows(normalised(y, w[2], w[3]), w[4], w[5]));
  return few_rows(inner, w[6], w[7]).add_(y);
}

void check(const Tensor& x, Weights weights, size_t count, const Tensor& keys, const Tensor& values, const Tensor& rows,
           const Tensor& places, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(weights.size() == count, "there are ", weights.size(), " weights, not ", count);
  for (const Tensor& each : {x, keys, values, cos, sin})
    TORCH_CHECK(each.scalar_type() == at::kFloat && each.is_contiguous(), "states, caches and angles must be dense float32");
  TORCH_CHECK(x.dim() == 2 && x.size(0) <= kFewRows, "x is ", x.sizes(), "; at most ", kFewRows, " rows");
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.dim() == 2 && keys.size(1) == x.size(1), "the cache is ", keys.sizes());
  for (const Tensor& each : {rows, places})
    TORCH_CHECK(each.scalar_type() == at::kLong && each.is_contiguous() && each.numel() == x.size(0), "rows and places must be (N,) int64");
}

// weights: norm_attention, qkv, out, norm_feedforward, up, down. Row n reads the slots at its place less each offset, and writes its own.
Tensor encoder_step(const Tensor& x, Weights w, Tensor keys, Tensor values, const Tensor& rows, const Tensor& places, const Tensor& offsets,
                    int64_t length, const Tensor& cos, const Tensor& sin, int64_t heads) {
  check(x, w, 12, keys, values, rows, places, cos, sin);
  TORCH_CHECK(offsets.scalar_type() == at::kLong && offsets.is_contiguous(), "offsets must be int64");
  const int64_t N = x.size(0), d = x.size(1), D = d / heads, K = offsets.numel();
  const int64_t *row = rows.const_data_ptr<int64_t>(), *place = places.const_data_ptr<int64_t>(), *off = offsets.const_data_ptr<int64_t>();
  Tensor qkv = few_rows(normalised(x, w[0], w[1]), w[2], w[3]);  // (N, 3d)
  float* p = qkv.mutable_data_ptr<float>();
  float *k = keys.mutable_data_ptr<float>(), *v = values.mutable_data_ptr<float>();
  std::vector<float> turned_query(d);
  for (int64_t n = 0; n < N; ++n, p += 3 * d) {
    const int64_t slot = row[n] * length + place[n];
    TORCH_CHECK(place[n] >= 0 && place[n] < length && slot < keys.size(0), "row ", row[n], ", place ", place[n], " is outside the cache");
    const float *c = cos.const_data_ptr<float>() + n * (D / 2), *s = sin.const_data_ptr<float>() + n * (D / 2);
    turn(p + d, k + slot * d, heads, D, c, s);
    std::copy_n(p + 2 * d, d, v + slot * d);
    turn(p, turned_query.data(), heads, D, c, s);
    std::copy_n(turned_query.data(), d, p);
  }
  const auto count = [&](int64_t n) { return std::upper_bound(off, off + K, place[n]) - off; };
  const auto slot = [&](int64_t n, int64_t i) { return row[n] * length + place[n] - off[i]; };
  return finished(x, attended(qkv, 3 * d, keys, values, heads, count, slot, N, d), w.slice(4));
}

// weights: norm_feature, k, v. Keys and values of features (N, d) go to their slots.
void keys_step(const Tensor& feature, Weights w, Tensor keys, Tensor values, const Tensor& slots, const Tensor& cos, const Tensor& sin,
               int64_t heads) {
  check(feature, w, 6, keys, values, slots, slots, cos, sin);
  const int64_t N = feature.size(0), d = feature.size(1), D = d / heads;
  const Tensor x = normalised(feature, w[0], w[1]), k = few_rows(x, w[2], w[3]), v = few_rows(x, w[4], w[5]);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t slot = slots.const_data_ptr<int64_t>()[n];
    TORCH_CHECK(slot >= 0 && slot < keys.size(0), "slot ", slot, " is outside the cache");
    turn(k.const_data_ptr<float>() + n * d, keys.mutable_data_ptr<float>() + slot * d, heads, D,
         cos.const_data_ptr<float>() + n * (D / 2), sin.const_data_ptr<float>() + n * (D / 2));
    std::copy_n(v.const_data_ptr<float>() + n * d, d, values.mutable_data_ptr<float>() + slot * d);
  }
}

// weights: norm_query, q, out, norm_feedforward, up, down. Row n, at place t, reads prefix slots t-1, t-1-stride, ... and, where `lengths`
// are positive, the suffix slots length + t+1, length + t+1+stride, ... below its text's own length.
Tensor decoder_step(const Tensor& x, Weights w, const Tensor& keys, const Tensor& values, const Tensor& rows, const Tensor& places,
                    const Tensor& lengths, int64_t stride, int64_t length, const Tensor& cos, const Tensor& sin, int64_t heads) {
  check(x, w, 12, keys, values, rows, places, cos, sin);
  TORCH_CHECK(lengths.scalar_type() == at::kLong && lengths.is_contiguous() && lengths.numel() == x.size(0), "lengths must be (N,) int64");
  const int64_t N = x.size(0), d = x.size(1), D = d / heads;
  const int64_t *row = rows.const_data_ptr<int64_t>(), *place = places.const_data_ptr<int64_t>();
  const int64_t* ends = lengths.const_data_ptr<int64_t>();
  std::vector<int64_t> before(N), counts(N);
  bool both = false;
  for (int64_t n = 0; n < N; ++n) {
    TORCH_CHECK(place[n] >= 0 && place[n] < length && ends[n] <= length, "place ", place[n], ", text of ", ends[n], ", cache of ", length);
    before[n] = (place[n] + stride - 1) / stride;
    counts[n] = before[n] + (ends[n] > 0 ? (ends[n] - 1 - place[n] + stride - 1) / stride : 0);
    both |= ends[n] > 0;
  }
  const int64_t slots = both ? 2 * length : length;
  for (int64_t n = 0; n < N; ++n) TORCH_CHECK((row[n] + 1) * slots <= keys.size(0), "row ", row[n], " is outside the cache");
  const Tensor q = few_rows(normalised(x, w[0], w[1]), w[2], w[3]);
  Tensor turned_q = at::empty_like(q);
  for (int64_t n = 0; n < N; ++n)
    turn(q.const_data_ptr<float>() + n * d, turned_q.mutable_data_ptr<float>() + n * d, heads, D, cos.const_data_ptr<float>() + n * (D / 2),
         sin.const_data_ptr<float>() + n * (D / 2));
  const auto count = [&](int64_t n) { return counts[n]; };
  const auto slot = [&](int64_t n, int64_t i) {
    return row[n] * slots + (i < before[n] ? place[n] - 1 - stride * i : length + place[n] + 1 + stride * (i - before[n]));
  };
  return finished(x, attended(turned_q, d, keys, values, heads, count, slot, N, d), w.slice(4));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) {
  m.def(
      "encoder_step(Tensor x, Tensor[] weights, Tensor(a!) keys, Tensor(b!) values, Tensor rows, Tensor places, Tensor offsets, int length,"
      " Tensor cos, Tensor sin, int heads) -> Tensor");
  m.def(
      "keys_step(Tensor feature, Tensor[] weights, Tensor(a!) keys, Tensor(b!) values, Tensor slots, Tensor cos, Tensor sin, int heads)"
      " -> ()");
  m.def(
      "decoder_step(Tensor x, Tensor[] weights, Tensor keys, Tensor values, Tensor rows, Tensor places, Tensor lengths, int stride,"
      " int length, Tensor cos, Tensor sin, int heads) -> Tensor");
}

TORCH_LIBRARY_IMPL(tracformer, CPU, m) {
  m.impl("encoder_step", encoder_step);
  m.impl("keys_step", keys_step);
  m.impl("decoder_step", decoder_step);
}

}  // namespace tracformer
