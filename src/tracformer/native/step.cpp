// The step of generation: in one call the encoder over some tokens, with the decoder's keys of
// them; in another the decoder over some positions, up to the logits. A few rows at a time go
// through all layers.
//
// Rows are (sequence, place) pairs. A place is a position; the suffix encoder's places count from
// the end of the text. Caches are (B * slots, d), the heads of a token side by side. States are
// float32; weights are stored as a `Matrix`. With enough rows, each thread takes some of them
// through all layers. Otherwise all threads work on the same layer: they divide the outputs of a
// product, and the heads of attention.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "few_rows.h"
#include "matrix.h"
#include "pieces.h"
#include "team.h"

namespace tracformer {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kLeastPortion = 1 << 14;  // bytes of weights: smaller portions cost more waiting than work
constexpr int64_t kPortion = 1 << 19;       // with larger portions, threads finish at different times
constexpr int64_t kOwnRows = 16;            // per thread: with fewer, sharing the layers is faster

struct Rest {  // the part of a layer after its attention
  Matrix out;
  Norm norm;
  Matrix up, down;
};

struct EncoderLayer {
  Norm norm;
  Matrix qkv;
  Rest rest;
  Norm norm_feature;  // these belong to the decoder layer that reads this layer
  Matrix k, v;
  const int64_t* offsets;  // ascending distances from a query back to its keys
  int64_t reach;           // number of offsets
};

struct DecoderLayer {
  Norm norm;
  Matrix q;
  Rest rest;
  int64_t stride;
};

// Reads the flat list of weights in the order in which it was written.
class Reader {
 public:
  Reader(const Tensors& weights, int64_t d) : weights_(weights), d_(d) {}
  Norm norm() {
    const float* weight = floats(next(), d_);
    return {weight, floats(next(), d_)};
  }
  Matrix matrix(int64_t outputs, int64_t width) {  // three tensors; an empty one means no scale, or no bias
    const Tensor &weight = next(), &scale = next(), &bias = next();
    const auto unless_empty = [](const Tensor& x) { return x.numel() ? std::optional<Tensor>(x) : std::nullopt; };
    TORCH_CHECK(weight.dim() == 2 && weight.size(0) == outputs && weight.size(1) == width, "a weight is ", weight.sizes(), ", not (", outputs,
                ", ", width, ")");
    const Matrix matrix = matrix_of(weight, unless_empty(scale), unless_empty(bias));
    bytes += matrix.bytes(), ++products;
    return matrix;
  }
  Rest rest() {
    const Matrix out = matrix(d_, d_);
    const Norm after = norm();
    const Matrix up = matrix(4 * d_, d_);
    return {out, after, up, matrix(d_, 4 * d_)};
  }
  const Tensor& next() {
    TORCH_CHECK(at_ < weights_.size(), "there are only ", weights_.size(), " weights");
    return weights_[at_++];
  }
  void finish() const { TORCH_CHECK(at_ == weights_.size(), "there are ", weights_.size(), " weights, not ", at_); }
  int64_t bytes = 0, products = 0;

 private:
  const Tensors& weights_;
  const int64_t d_;
  size_t at_ = 0;
};

const int64_t* integers(const Tensor& x, int64_t count) {
  TORCH_CHECK(x.scalar_type() == at::kLong && x.is_contiguous() && x.numel() == count, "a tensor is ", x.scalar_type(), " ", x.sizes(),
              "; it must be dense int64 with ", count, " elements");
  return x.const_data_ptr<int64_t>();
}

// Keys and values of one layer.
struct Slots {
  float *keys, *values;
};

// A few rows: their places, and buffers for their states.
struct Batch {
  int64_t N, d, heads, D;
  // end, in the encoder: zero, or the length of the text that is read from its end
  const int64_t *row, *place, *end;
  const float *cos, *sin;            // (T, D/2) tables
  Scratch<float> memory;
  float *x, *projected, *mixed, *inner, *turned;  // (N, d), (N, 3d), (N, d), (N, 4d), (4d, N rounded up to vectors)

  Batch(int64_t N, int64_t d, int64_t heads, const int64_t* row, const int64_t* place, const int64_t* end, const float* cos, const float* sin)
      : N(N), d(d), heads(heads), D(d / heads), row(row), place(place), end(end), cos(cos), sin(sin) {
    x = memory.take(N * d), projected = memory.take(3 * N * d), mixed = memory.take(N * d), inner = memory.take(4 * N * d);
    turned = memory.take(N > kAloneRows ? 4 * d * turned_rows(N) : 0);
  }
  bool backward(int64_t n) const { return end && end[n] > 0; }
  int64_t position(int64_t n) const { return backward(n) ? end[n] - 1 - place[n] : place[n]; }
  void rotate_head(const float* from, int64_t n, float* to) const {
    rotate(from, to, D, cos + position(n) * (D / 2), sin + position(n) * (D / 2));
  }
};

struct Product {
  const Matrix* matrix = nullptr;
  float* out = nullptr;  // (N, out_width)
  int64_t out_width = 0;
  bool add = false, gelu = false;  // add to `out`; apply GELU
};

// The work of one thread in all layers.
class Worker {
 public:
  static constexpr int64_t kStages = 14;  // at most, in one layer

  Worker(Member me, Batch& at, int64_t most_keys) : me_(me), at_(at), alone_(at.N <= kAloneRows) {
    own_ = memory_.take(at.N * at.d), query_ = memory_.take(at.D), scores_ = memory_.take(most_keys + kLanes<float>);
  }

  void encode(const EncoderLayer& layer, const Slots& kept, const Slots& read, int64_t length, int64_t sides) {
    const int64_t N = at_.N, d = at_.d, D = at_.D;
    multiply({&layer.qkv, at_.projected, 3 * d}, at_.x, &layer.norm);
    me_.stage(at_.heads, 1, me_.size(), [&](int64_t first, int64_t last) {
      for (int64_t h = first * D; h < last * D; h += D) {  // the thread that writes a head's keys also reads them
        for (int64_t n = 0; n < N; ++n) {
          const int64_t slot = at_.row[n] * length + at_.place[n];
          at_.rotate_head(at_.projected + n * 3 * d + d + h, n, kept.keys + slot * d + h);
          std::copy_n(at_.projected + n * 3 * d + 2 * d + h, D, kept.values + slot * d + h);
        }
        for (int64_t n = 0; n < N; ++n) {
          const int64_t count = std::upper_bound(layer.offsets, layer.offsets + layer.reach, at_.place[n]) - layer.offsets;
          const int64_t here = at_.row[n] * length + at_.place[n];
          at_.rotate_head(at_.projected + n * 3 * d + h, n, query_);
          attend(query_, kept.keys + h, kept.values + h, d, D, count, [&](int64_t i) { return here - layer.offsets[i]; },
                 at_.mixed + n * d + h, scores_);
        }
      }
    });
    finish(layer.rest);
    multiply({&layer.k, at_.projected, 2 * d}, at_.x, &layer.norm_feature, {&layer.v, at_.projected + d, 2 * d});
    me_.stage(at_.heads, 1, N, [&](int64_t first, int64_t last) {
      for (int64_t h = first * D; h < last * D; h += D)
        for (int64_t n = 0; n < N; ++n) {
          const int64_t slot = at_.row[n] * sides * length + (at_.backward(n) ? length : 0) + at_.position(n);
          at_.rotate_head(at_.projected + n * 2 * d + h, n, read.keys + slot * d + h);
          std::copy_n(at_.projected + n * 2 * d + d + h, D, read.values + slot * d + h);
        }
    });
  }

  // Row n, at place t, reads prefix slots t-1, t-1-stride, ... and, where its length is positive,
  // suffix slots length + t+1, length + t+1+stride, ... within its text.
  void decode(const DecoderLayer& layer, const Slots& read, const int64_t* lengths, int64_t length, int64_t sides) {
    const int64_t N = at_.N, d = at_.d, D = at_.D, stride = layer.stride;
    multiply({&layer.q, at_.projected, d}, at_.x, &layer.norm);
    me_.stage(N * at_.heads, 1, 4 * me_.size(), [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        const int64_t n = task / at_.heads, h = task % at_.heads * D, t = at_.place[n], origin = at_.row[n] * sides * length;
        const int64_t before = (t + stride - 1) / stride, after = lengths[n] > 0 ? (lengths[n] - 1 - t + stride - 1) / stride : 0;
        at_.rotate_head(at_.projected + n * d + h, n, query_);
        const auto slot = [&](int64_t i) { return origin + (i < before ? t - 1 - stride * i : length + t + 1 + stride * (i - before)); };
        attend(query_, read.keys + h, read.values + h, d, D, before + after, slot, at_.mixed + n * d + h, scores_);
      }
    });
    finish(layer.rest);
  }

  void answer(const Norm& norm, const Matrix& head, float* logits) { multiply({&head, logits, head.outputs}, at_.x, &norm); }

 private:
  // x (N, width), normalised if there is a norm, times one matrix, or two of the same shape.
  void multiply(const Product& first, const float* x, const Norm* norm, const Product& second = {}) {
    const Matrix& m = *first.matrix;
    if (!alone_)
      me_.stage(m.width, 16, me_.size(), [&](int64_t from, int64_t to) {
        if (norm) normalise_columns(x, *norm, from, to);
        turn_columns(norm ? own_ : x, at_.N, m.width, from, to, at_.turned);
      });
    const float* operand = alone_ ? x : at_.turned;
    bool ready = !alone_ || !norm;
    const int64_t bytes = m.bytes(), portions = std::max(bytes / kPortion, std::min(bytes / kLeastPortion, 4 * int64_t{me_.size()}));
    me_.stage(m.outputs, 16, portions, [&](int64_t from, int64_t to) {
      if (!ready) {  // each thread normalises few rows itself: faster than waiting
        normalise_columns(x, *norm, 0, m.width);
        operand = own_, ready = true;
      }
      for (const Product& each : {first, second})
        if (each.matrix) {
          product(*each.matrix, operand, at_.N, each.out, each.out_width, from, to, each.add);
          if (each.gelu)
            for (int64_t n = 0; n < at_.N; ++n) gelu(each.out + n * each.out_width + from, to - from);
        }
    });
  }
  void normalise_columns(const float* x, const Norm& norm, int64_t from, int64_t to) {
    for (int64_t n = 0; n < at_.N; ++n) normalise(x + n * at_.d, at_.d, norm, from, to, own_ + n * at_.d);
  }

  // x + out(mixed), then x + down(gelu(up(norm(x)))).
  void finish(const Rest& rest) {
    const int64_t d = at_.d;
    multiply({&rest.out, at_.x, d, true}, at_.mixed, nullptr);
    multiply({&rest.up, at_.inner, 4 * d, false, true}, at_.x, &rest.norm);
    multiply({&rest.down, at_.x, d, true}, at_.inner, nullptr);
  }

  Member me_;
  Batch& at_;
  const bool alone_;  // few rows: products without transposing them
  Scratch<float> memory_;
  float *own_, *query_, *scores_;  // (N, d); (D); (keys)
};

struct Step : torch::CustomClassHolder {
  // weights: embedding; each encoder layer's norm_attention, qkv, out, norm_feedforward, up, down,
  // then norm_feature, k, v of the decoder layer that reads it; each decoder layer's norm_query, q,
  // out, norm_feedforward, up, down; norm, head. offsets: of each encoder layer, ascending.
  Step(Tensors weights, Tensors offsets, std::vector<int64_t> strides, int64_t heads)
      : weights_(std::move(weights)), offsets_(std::move(offsets)), heads_(heads) {
    TORCH_CHECK(!weights_.empty() && weights_[0].dim() == 2, "the first weight must be the embedding");
    d_ = weights_[0].size(1);
    TORCH_CHECK(heads > 0 && d_ % heads == 0 && d_ / heads % 2 == 0, "a width of ", d_, " is not divided by ", heads, " into even heads");
    Reader read(weights_, d_);
    const Tensor& embedding = read.next();
    vocabulary_ = embedding.size(0), embedding_ = floats(embedding, vocabulary_ * d_);
    for (const Tensor& each : offsets_) {
      const Norm norm = read.norm();
      const Matrix qkv = read.matrix(3 * d_, d_);
      const Rest rest = read.rest();
      const Norm feature = read.norm();
      const Matrix k = read.matrix(d_, d_);
      encoder_.push_back({norm, qkv, rest, feature, k, read.matrix(d_, d_), integers(each, each.numel()), each.numel()});
      TORCH_CHECK(each.numel() > 0 && encoder_.back().offsets[0] >= 0, "a query reads itself or what is behind it");
    }
    for (const int64_t stride : strides) {
      TORCH_CHECK(stride > 0, "a stride is ", stride);
      const Norm norm = read.norm();
      const Matrix q = read.matrix(d_, d_);
      decoder_.push_back({norm, q, read.rest(), stride});
    }
    norm_ = read.norm();
    const Tensor& head = weights_[weights_.size() - 3];
    head_ = read.matrix(head.size(0), d_);
    read.finish();
    threads_ = std::max<int64_t>(1, read.bytes / read.products / kLeastPortion);
  }

  // Encodes tokens (N) at (rows, places), ascending in each sequence; all tokens before them must
  // be encoded already. ends (N): zero, or the length of the text that the suffix encoder reads; a
  // sequence is read in one direction at a time, since both directions use the same slots for their
  // keys. Keys and values of encoder and decoder go to their slots; `read_*` are the decoder's, in
  // the order of the encoder layers that they belong to.
  void encode(const Tensor& tokens, const Tensor& rows, const Tensor& places, const Tensor& ends, const Tensor& cos, const Tensor& sin,
              int64_t sides, const Tensors& kept_keys, const Tensors& kept_values, const Tensors& read_keys, const Tensors& read_values) const {
    const int64_t N = tokens.numel(), length = cos.size(0);
    const Places all = places_of(N, rows, places, ends, length, sides);
    const std::vector<Slots> kept = slots_of(kept_keys, kept_values, all, length), read = slots_of(read_keys, read_values, all, sides * length);
    const int64_t* token = integers(tokens, N);
    for (int64_t n = 0; n < N; ++n) TORCH_CHECK(token[n] >= 0 && token[n] < vocabulary_, "token ", token[n], " of ", vocabulary_);
    int64_t most = 0;
    for (const EncoderLayer& layer : encoder_) most = std::max(most, layer.reach);
    in_handfuls(all, [&](int64_t first, int64_t count) {
      Batch at = batch_of(all, first, count, cos, sin);
      for (int64_t n = 0; n < at.N; ++n) std::copy_n(embedding_ + token[first + n] * d_, d_, at.x + n * d_);
      together(threads_, encoder_.size() * Worker::kStages, [&](const Member& me) {
        Worker worker(me, at, most);
        for (size_t i = 0; i < encoder_.size(); ++i) worker.encode(encoder_[i], kept[i], read[i], length, sides);
      });
    });
  }

  // Returns logits (N, vocabulary) at (rows, places); all tokens before them must be encoded.
  // lengths (N) are those of the texts, zero where no suffix is read.
  Tensor decode(const Tensor& rows, const Tensor& places, const Tensor& lengths, const Tensor& cos, const Tensor& sin, int64_t sides,
                const Tensors& read_keys, const Tensors& read_values) const {
    const int64_t N = rows.numel(), length = cos.size(0);
    const Places all = places_of(N, rows, places, lengths, length, sides);
    const std::vector<Slots> read = slots_of(read_keys, read_values, all, sides * length);
    Tensor logits = at::empty({N, head_.outputs}, cos.options());
    float* out = logits.mutable_data_ptr<float>();
    in_handfuls(all, [&](int64_t first, int64_t count) {
      Batch at = batch_of({all.N, all.row, all.place, nullptr}, first, count, cos, sin);
      together(threads_, (decoder_.size() + 1) * Worker::kStages, [&](const Member& me) {
        Worker worker(me, at, 2 * length);
        for (size_t i = 0; i < decoder_.size(); ++i) worker.decode(decoder_[i], read[i], all.end + first, length, sides);
        worker.answer(norm_, head_, out + first * head_.outputs);
      });
    });
    return logits;
  }

 private:
  struct Places {
    int64_t N;
    const int64_t *row, *place, *end;
  };

  static Places places_of(int64_t N, const Tensor& rows, const Tensor& places, const Tensor& ends, int64_t length, int64_t sides) {
    const Places all{N, integers(rows, N), integers(places, N), integers(ends, N)};
    for (int64_t n = 0; n < N; ++n) {
      const int64_t row = all.row[n], place = all.place[n], end = all.end[n];
      TORCH_CHECK(row >= 0 && place >= 0 && place < length, "row ", row, ", place ", place, " is outside a cache of ", length);
      TORCH_CHECK(end == 0 || (sides == 2 && place < end && end <= length), "place ", place, " of a text of ", end, ", a cache of ", length,
                  " with ", sides, " sides");
    }
    return all;
  }

  // Where the rows of each thread begin, and the end. No sequence is divided, since later rows read
  // earlier ones. There is one part only if rows are too few for each thread, if parts would be too
  // unequal, or if sequences are not in order.
  static std::vector<int64_t> parts_of(const Places& all) {
    const int64_t N = all.N, threads = at::in_parallel_region() ? 1 : at::get_num_threads();
    if (threads == 1 || N < threads * kOwnRows || !std::is_sorted(all.row, all.row + N)) return {0, N};
    std::vector<int64_t> cuts{0};
    for (int64_t part = 1; part <= threads; ++part) {
      int64_t cut = std::max(cuts.back(), N * part / threads);
      while (cut > 0 && cut < N && all.row[cut] == all.row[cut - 1]) ++cut;
      if (2 * (cut - cuts.back()) * threads > 3 * N) return {0, N};
      cuts.push_back(cut);
    }
    return cuts;
  }

  // work(first, count) over all rows, at most kFewRows at a time.
  template <typename Work>
  static void in_handfuls(const Places& all, const Work& work) {
    const std::vector<int64_t> cuts = parts_of(all);
    const int64_t few = cuts.size() > 2 ? kOwnRows : kFewRows;
    const auto part = [&](int64_t i) {
      for (int64_t first = cuts[i], last = cuts[i + 1]; first < last; first += few) work(first, std::min(few, last - first));
    };
    if (cuts.size() == 2) return part(0);  // all threads share its layers
    const int64_t parts = static_cast<int64_t>(cuts.size()) - 1;
    together(parts, 1, [&](Member me) {
      me.stage(parts, 1, parts, [&](int64_t i, int64_t last) {
        for (; i < last; ++i) part(i);
      });
    });
  }

  Batch batch_of(const Places& all, int64_t first, int64_t count, const Tensor& cos, const Tensor& sin) const {
    const int64_t table = cos.size(0) * (d_ / heads_ / 2);
    return Batch(count, d_, heads_, all.row + first, all.place + first, all.end ? all.end + first : nullptr, floats(cos, table),
                 floats(sin, table));
  }

  std::vector<Slots> slots_of(const Tensors& keys, const Tensors& values, const Places& all, int64_t slots) const {
    TORCH_CHECK(keys.size() == encoder_.size() && values.size() == encoder_.size(), "there are ", keys.size(), " caches");
    const int64_t last = all.N ? *std::max_element(all.row, all.row + all.N) : -1;
    std::vector<Slots> found;
    for (size_t i = 0; i < keys.size(); ++i) {
      for (const Tensor& each : {keys[i], values[i]}) {
        floats(each, each.numel());
        TORCH_CHECK((last + 1) * slots * d_ <= each.numel(), "row ", last, " is outside a cache of ", each.sizes());
      }
      found.push_back({keys[i].mutable_data_ptr<float>(), values[i].mutable_data_ptr<float>()});
    }
    return found;
  }

  const Tensors weights_, offsets_;  // kept alive, because layers point into them
  const int64_t heads_;
  int64_t d_ = 0, vocabulary_ = 0, threads_ = 1;
  const float* embedding_ = nullptr;
  std::vector<EncoderLayer> encoder_;
  std::vector<DecoderLayer> decoder_;
  Norm norm_{};
  Matrix head_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tracformer, m) {
  m.class_<Step>("Step")
      .def(torch::init<Tensors, Tensors, std::vector<int64_t>, int64_t>())
      .def("encode", &Step::encode)
      .def("decode", &Step::decode);
}

}  // namespace tracformer
