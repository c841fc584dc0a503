// Softmax, rotation and products of vectors of channels, for tokens of any tier.

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, to some units in the last place; written so that the compiler makes vectors of it.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  float turns = std::nearbyint(x * 1.44269504f);
  float rest = x - turns * 0.693359375f + turns * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1.0f;
  return y * bits_of<float>((static_cast<int32_t>(turns) + 127) << 23);
}

// exp(x - top) for a finite top; 0 for -inf and very small results.
inline float weight_of(float x, float top) { return x - top < -87.0f ? 0.0f : exponential(x - top); }

inline float base_of(float peak) { return peak == kNothing ? 0.0f : peak; }

// The largest element; NaN is ignored.
inline float largest(const float* x, int64_t count) {
  Floats tops = Floats{} + kNothing;
  int64_t t = 0;
  for (; t + kLanes <= count; t += kLanes) {
    const Floats next = load(x + t);
    tops = next > tops ? next : tops;
  }
  float top = kNothing;
  for (int i = 0; i < kLanes; ++i) top = std::max(top, tops[i]);
  for (; t < count; ++t) top = std::max(top, x[t]);
  return top;
}

// Replace a row's logits by weights exp(x - peak); their peak and sum.
inline void softmax(float* x, int64_t count, float* peak, float* total) {
  const float top = largest(x, count), base = base_of(top);
  float sum = 0.0f;
  for (int64_t t = 0; t < count; ++t) x[t] = weight_of(x[t], base);
  for (int64_t t = 0; t < count; ++t) sum += x[t];
  *peak = top;
  *total = sum;
}

// The orthonormal Hadamard transform of x[d], in blocks of `block` channels.
inline void rotate(float* x, int64_t d, int64_t block) {
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t first = 0; first < d; first += 2 * half)
      for (int64_t c = first; c < first + half; ++c) {
        const float a = x[c], b = x[c + half];
        x[c] = a + b;
        x[c + half] = a - b;
      }
  const float norm = 1.0f / std::sqrt(static_cast<float>(block));
  for (int64_t c = 0; c < d; ++c) x[c] *= norm;
}

// Σ q·x over d channels.
template <typename Number>
inline float dot(const float* q, const Number* x, int64_t d) {
  float sum = 0.0f;
  for (int64_t c = 0; c < d; ++c) sum += q[c] * static_cast<float>(x[c]);
  return sum;
}

// out[rows][d] += weights·x[d]; the rows' weights are `stride` apart.
template <typename Number>
inline void add_weighted(const float* weights, int64_t stride, const Number* x, int64_t rows, int64_t d, float* out) {
  for (int64_t m = 0; m < rows; ++m, out += d) {
    const float weight = weights[m * stride];
    for (int64_t c = 0; c < d; ++c) out[c] += weight * static_cast<float>(x[c]);
  }
}

}  // namespace
