// Vectors of float or double, as wide as the target allows, in the compiler's vector types: one
// source for all processors.
#pragma once

#include <cstdint>
#include <limits>

namespace tracformer {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// 32 registers hold a 6 x 4 block of sums and its operands, 16 hold 6 x 2.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockVectors = 4;
#else
constexpr int kBlockVectors = 2;
#endif
constexpr int kBlockRows = 6;

template <typename T>
struct Types;

template <>
struct Types<float> {
  using Integer = int32_t;
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef float Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(float)), may_alias));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 23, bias = 127;
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // 9 bits: its product with n is exact
  static constexpr float lowest_exponent = -87.0f;
  static constexpr int degree = 7;
};

template <>
struct Types<double> {
  using Integer = int64_t;
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef double Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(double)), may_alias));
  typedef int64_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int mantissa = 52, bias = 1023;
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
  static constexpr double lowest_exponent = -708.0;
  static constexpr int degree = 13;
};

template <typename T>
using Vector = typename Types<T>::Vector;

template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
constexpr int64_t padded(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

template <typename T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename Types<T>::Unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vector<T> x) {
  *reinterpret_cast<typename Types<T>::Unaligned*>(to) = x;
}

template <typename T>
inline Vector<T> broadcast(T x) {
  return x - Vector<T>{};  // optimised away, unlike 0 + x, which turns -0 into 0
}

template <typename T>
inline typename Types<T>::Integers lane_numbers() {
  typename Types<T>::Integers numbers;
  for (int i = 0; i < kLanes<T>; ++i) numbers[i] = i;
  return numbers;
}

// x in lanes from .. to-1, `otherwise` in the rest.
template <typename T>
inline Vector<T> lanes_between(Vector<T> x, int64_t from, int64_t to, T otherwise) {
  using Integer = typename Types<T>::Integer;
  const auto lane = lane_numbers<T>();
  const auto in = (lane >= static_cast<Integer>(from)) & (lane < static_cast<Integer>(to));
  return in ? x : broadcast<T>(otherwise);
}

template <typename T>
inline Vector<T> first_lanes(Vector<T> x, int64_t count, T otherwise) {
  return lane_numbers<T>() < static_cast<typename Types<T>::Integer>(count) ? x : broadcast<T>(otherwise);
}

// Lane i of the result is lane from[i] of a and b, concatenated.
template <typename T>
inline Vector<T> shuffled(Vector<T> a, Vector<T> b, typename Types<T>::Integers from) {
#if defined(__clang__)
  Vector<T> mixed;
  for (int i = 0; i < kLanes<T>; ++i) mixed[i] = from[i] < kLanes<T> ? a[from[i]] : b[from[i] - kLanes<T>];
  return mixed;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

template <typename T>
inline T sum_of_lanes(Vector<T> x) {
#pragma GCC unroll 4
  for (int width = kLanes<T> / 2; width > 0; width /= 2) x += shuffled<T>(x, x, lane_numbers<T>() + width);
  return x[0];
}

template <typename T>
inline T highest_lane(Vector<T> x) {
#pragma GCC unroll 4
  for (int width = kLanes<T> / 2; width > 0; width /= 2) {
    const Vector<T> other = shuffled<T>(x, x, lane_numbers<T>() + width);
    x = other > x ? other : x;
  }
  return x[0];
}

template <typename T>
constexpr T inverse_factorial(int n) {
  T product = 1;
  for (int i = 2; i <= n; ++i) product *= static_cast<T>(i);
  return 1 / product;
}

// exp(x) for x <= 0 or slightly above, to about one unit in the last place: x = n ln 2 + r, with
// the Taylor series in r, |r| <= ln 2 / 2. Results below the smallest normal number are clamped to
// it; nan stays nan.
template <typename T>
inline Vector<T> exponential(Vector<T> x) {
  using Traits = Types<T>;
  using Integers = typename Traits::Integers;
  const Vector<T> lowest = broadcast<T>(Traits::lowest_exponent);
  x = x < lowest ? lowest : x;
  // Adding 1.5 * 2^mantissa rounds to an integer and leaves it in the low bits.
  constexpr T shifter = static_cast<T>(3) * static_cast<T>(int64_t{1} << (Traits::mantissa - 1));
  const Vector<T> shifted = x * static_cast<T>(1.4426950408889634074) + shifter;
  const Vector<T> n = shifted - shifter;
  const Vector<T> r = (x - n * Traits::ln2_high) - n * Traits::ln2_low;
  Vector<T> series = broadcast<T>(inverse_factorial<T>(Traits::degree));
#pragma GCC unroll 16
  for (int i = Traits::degree - 1; i >= 0; --i) series = series * r + inverse_factorial<T>(i);
  const Integers power = (reinterpret_cast<Integers>(shifted) + Traits::bias) << Traits::mantissa;  // 2^n
  return series * reinterpret_cast<Vector<T>>(power);
}

// scores := exp(scores - shift), zero from `count` to the end of its vector; returns the sum.
template <typename T>
inline T exponentiate(T* scores, int64_t count, T shift) {
  Vector<T> sum{};
  for (int64_t j = 0; j < count; j += kLanes<T>) {
    const Vector<T> weights = first_lanes<T>(exponential<T>(load(scores + j) - shift), count - j, 0);
    store(scores + j, weights);
    sum += weights;
  }
  return sum_of_lanes<T>(sum);
}

}  // namespace tracformer
