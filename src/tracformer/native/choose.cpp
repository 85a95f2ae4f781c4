// From logits to tokens, row by row, in float64: the rules of generation/samplers.py in one call.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

#include "simd.h"
#include "team.h"

namespace tracformer {
namespace {

using at::Tensor;

constexpr int64_t kLeastShare = 1 << 14;  // logits: less work is not worth a thread
constexpr int64_t kHeap = 64;             // best scores kept in a heap while scanning

struct Rules {
  double temperature, top_k, top_p, min_p, uniform;
};

// Whole vectors are read and written, so elements after the last one are touched.
using Numbers = std::vector<double>;
constexpr int64_t kSpare = 64 / sizeof(double);

// scores := exp(scores), zero where that would underflow; returns the sum.
double weigh(double* scores, int64_t count) {
  constexpr int L = kLanes<double>;
  Vector<double> sum{};
  for (int64_t j = 0; j < count; j += L) {
    const Vector<double> score = load(scores + j), none{};
    const Vector<double> weights = first_lanes<double>(score < Types<double>::lowest_exponent ? none : exponential<double>(score), count - j, 0);
    store(scores + j, weights);
    sum += weights;
  }
  return sum_of_lanes<double>(sum);
}

template <typename T>
T highest(const T* x, int64_t count) {
  constexpr int L = kLanes<T>;
  if (count < L) return *std::max_element(x, x + count);
  Vector<T> best = load(x);
  for (int64_t j = L; j < count; j += L) {
    const Vector<T> some = load(x + std::min(j, count - L));  // the last vector overlaps the one before
    best = some > best ? some : best;
  }
  return highest_lane<T>(best);
}

class Chooser {
 public:
  explicit Chooser(int64_t vocabulary) : V_(vocabulary), all_(V_ + kSpare), kept_(V_ + kSpare), ranked_(V_), ids_(V_ + 1) {}

  // The token, or -1 if none is allowed; the log-probability of the draw, and that of the model.
  std::tuple<int64_t, double, double> operator()(const float* logits, const bool* forbidden, const Rules& rules) {
    const double most = highest(logits, V_);
    for (int64_t i = 0; i < V_; ++i) all_[i] = logits[i] - most;
    const double total = weigh(all_.data(), V_);
    const auto own = [&](int64_t token) { return logits[token] - most - std::log(total); };
    const bool truncated = (rules.top_k > 0 && rules.top_k < static_cast<double>(V_)) || rules.top_p < 1 || rules.min_p > 0;
    if (!forbidden && !truncated && rules.temperature == 1) {
      const int64_t token = inverse(all_.data(), V_, rules.uniform);
      return {token, own(token), own(token)};
    }
    int64_t count = permitted(logits, forbidden);
    if (count == 0) return {-1, 0.0, 0.0};
    const double best = highest(kept_.data(), count);
    if (best == -std::numeric_limits<double>::infinity()) return {-1, 0.0, 0.0};
    if (rules.temperature == 0) {
      const int64_t token = ids_[std::find(kept_.begin(), kept_.begin() + count, best) - kept_.begin()];
      return {token, 0.0, own(token)};
    }
    for (int64_t i = 0; i < count; ++i) kept_[i] = (kept_[i] - best) / rules.temperature;
    if (truncated) count = truncate(count, rules);
    Numbers& weights = all_;
    std::copy_n(kept_.begin(), count, weights.begin());
    const double sum = weigh(weights.data(), count);
    const int64_t at = inverse(weights.data(), count, rules.uniform);
    return {ids_[at], kept_[at] - std::log(sum), own(ids_[at])};
  }

 private:
  // The logits of allowed tokens, ascending by id.
  int64_t permitted(const float* logits, const bool* forbidden) {
    int64_t count = 0;
    for (int64_t i = 0; i < V_; ++i) {  // branch-free: a forbidden token is overwritten by the next one
      kept_[count] = logits[i], ids_[count] = i;
      count += !forbidden || !forbidden[i];
    }
    return count;
  }

  // Top-k, then top-p, then min-p, each on the tokens that the previous one kept.
  int64_t truncate(int64_t count, const Rules& rules) {
    if (rules.top_k > 0 && rules.top_k < static_cast<double>(count)) count = keep_from(best_but(static_cast<int64_t>(rules.top_k) - 1, count), count);
    if (rules.top_p < 1) count = keep_from(nucleus_floor(count, rules.top_p), count);
    if (rules.min_p > 0) count = keep_from(highest(kept_.data(), count) + std::log(rules.min_p), count);
    return count;
  }

  // The score that `others` other scores exceed or equal.
  double best_but(int64_t others, int64_t count) {
    const auto end = kept_.begin() + count, nth = ranked_.begin() + others;
    if (others < kHeap) {
      std::partial_sort_copy(kept_.begin(), end, ranked_.begin(), nth + 1, std::greater<>());
    } else {
      std::copy(kept_.begin(), end, ranked_.begin());
      std::nth_element(ranked_.begin(), nth, ranked_.begin() + count, std::greater<>());
    }
    return *nth;
  }

  int64_t keep_from(double least, int64_t count) {
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i)
      if (kept_[i] >= least) kept_[left] = kept_[i], ids_[left++] = ids_[i];
    return left;
  }

  // The lowest score of the smallest set of most likely tokens whose probabilities reach top_p.
  // Tokens below (1 - top_p) / count are not in it, since together they have less than 1 - top_p:
  // only the others are sorted.
  double nucleus_floor(int64_t count, double top_p) {
    std::copy_n(kept_.begin(), count, all_.begin());
    const double total = weigh(all_.data(), count), wanted = top_p * total;
    const double least = std::log((1 - top_p) / static_cast<double>(count) * total) - 1e-9;  // with a margin for rounding
    auto end = std::copy_if(kept_.begin(), kept_.begin() + count, ranked_.begin(), [&](double score) { return score >= least; });
    std::make_heap(ranked_.begin(), end);
    for (double reached = 0; end != ranked_.begin();) {
      std::pop_heap(ranked_.begin(), end--);
      if ((reached += std::exp(*end)) >= wanted) return *end;
    }
    return *std::min_element(kept_.begin(), kept_.begin() + count);
  }

  // The first token whose cumulative weight exceeds u times the total; rounding cannot select a
  // token after the last possible one.
  int64_t inverse(double* weights, int64_t count, double u) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) weights[i] = sum += weights[i];
    const auto end = weights + count;
    return std::min(std::upper_bound(weights, end, u * sum), std::lower_bound(weights, end, sum)) - weights;
  }

  const int64_t V_;
  // all_: weights of all tokens, later of the kept ones. kept_: scores of the kept tokens. ranked_:
  // the same in another order.
  Numbers all_, kept_, ranked_;
  std::vector<int64_t> ids_;     // ids of the kept tokens
};

// logits (N, V); masks (M, V): forbidden tokens; which (N): the mask of each row, or -1; rules
// (N, 5) as in `Rules`.
std::tuple<Tensor, Tensor, Tensor> choose(const Tensor& logits, const Tensor& masks, const Tensor& which, const Tensor& rules) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous(), "logits are ", logits.scalar_type(), " ",
              logits.sizes(), "; they must be dense float32 (N, V)");
  const int64_t N = logits.size(0), V = logits.size(1);
  TORCH_CHECK(V > 0 && masks.dim() == 2 && masks.size(1) == V && masks.scalar_type() == at::kBool && masks.is_contiguous(), "masks are ",
              masks.sizes());
  TORCH_CHECK(which.numel() == N && which.scalar_type() == at::kLong && which.is_contiguous(), "which is ", which.sizes());
  TORCH_CHECK(rules.numel() == N * 5 && rules.scalar_type() == at::kDouble && rules.is_contiguous(), "rules are ", rules.sizes());
  Tensor tokens = at::empty({N}, which.options()), drawn = at::empty({N}, rules.options()), own = at::empty({N}, rules.options());
  const int64_t* mask = which.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < N; ++n) TORCH_CHECK(mask[n] < masks.size(0), "mask ", mask[n], " of ", masks.size(0));
  const float* scores = logits.const_data_ptr<float>();
  const bool* forbidden = masks.const_data_ptr<bool>();
  const double* rule = rules.const_data_ptr<double>();
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  double *odds = drawn.mutable_data_ptr<double>(), *value = own.mutable_data_ptr<double>();
  together(N * V / kLeastShare, 1, [&](Member me) {
    Chooser chooser(V);
    me.stage(N, 1, N, [&](int64_t first, int64_t last) {
      for (int64_t n = first; n < last; ++n) {
        const double* r = rule + 5 * n;
        std::tie(token[n], odds[n], value[n]) =
            chooser(scores + n * V, mask[n] < 0 ? nullptr : forbidden + mask[n] * V, {r[0], r[1], r[2], r[3], r[4]});
      }
    });
  });
  return {tokens, drawn, own};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) {
  m.def("choose(Tensor logits, Tensor masks, Tensor which, Tensor rules) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tracformer, CPU, m) { m.impl("choose", choose); }

}  // namespace tracformer
