// Stored weights, widened to float32 in registers: float32, bfloat16 (the upper half of a float32),
// or int8.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace tracformer {

inline Vector<float> widened(const float* from) { return load(from); }

// Compilers widen by a factor of two at most; for four they convert lanes one by one. So intrinsics
// are used where they exist.
#if defined(__AVX512F__)
inline Vector<float> widened(const uint16_t* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<Vector<float>>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vector<float> widened(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
#elif defined(__AVX2__)
inline Vector<float> widened(const uint16_t* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return reinterpret_cast<Vector<float>>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vector<float> widened(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#else
inline Vector<float> widened(const uint16_t* from) {
  Types<float>::Integers bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
  return reinterpret_cast<Vector<float>>(bits);
}
inline Vector<float> widened(const int8_t* from) {
  Vector<float> values;
  for (int i = 0; i < kLanes<float>; ++i) values[i] = from[i];
  return values;
}
#endif

inline float widened_one(float x) { return x; }
inline float widened_one(uint16_t x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
inline float widened_one(int8_t x) { return x; }

enum class Kind { kFloat32, kBfloat16, kInt8 };

// A linear layer: out = scale * (weight x) + bias, row by row. Missing scales are 1, missing biases
// 0.
struct Matrix {
  Kind kind = Kind::kFloat32;
  const void* weight = nullptr;  // (outputs, width), rows `stride` elements apart
  int64_t outputs = 0, width = 0, stride = 0;
  const float *scale = nullptr, *bias = nullptr;  // (outputs)

  template <typename S>
  const S* row(int64_t output) const { return static_cast<const S*>(weight) + output * stride; }
  float finished(float sum, int64_t output) const { return (scale ? scale[output] * sum : sum) + (bias ? bias[output] : 0.0f); }
  int64_t bytes() const { return outputs * width * (kind == Kind::kFloat32 ? 4 : kind == Kind::kBfloat16 ? 2 : 1); }
};

}  // namespace tracformer
