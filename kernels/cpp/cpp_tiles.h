// Tiles of kLanes tokens: what a step's attention (cpp_attention.h) does with one, whatever tier it is from.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

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

// Vectors of channels whose sums are in registers at once: with few query rows one has too few
// sums for a processor that begins two in a cycle and takes four for each.
constexpr int kAtOnce = 2;
// Query rows whose sums are in registers at once.
constexpr int64_t kRows = kLanes == 16 ? 8 : 4;

// scores[r][tokens] = Σ_c q[r][c]·keys[c][tokens]: R query rows in registers, one load an element.
template <int R>
inline void score_rows(const float* q, const Floats* keys, int64_t d, Floats* scores) {
  Floats sums[R] = {};
  for (int64_t c = 0; c < d; ++c)
    for (int r = 0; r < R; ++r) sums[r] = fma(Floats{} + q[r * d + c], keys[c], sums[r]);
  for (int r = 0; r < R; ++r) scores[r] = sums[r];
}

// out[r][c..c+kLanes·U] += Σ_t weights[r][t]·values[t][c..c+kLanes·U], for a tile of tokens.
template <int R, int U>
inline void mix_rows(const float* weights, int64_t stride, const float* values, int64_t d, int64_t c, float* out) {
  Floats sums[U][R];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) sums[u][r] = load(out + r * d + c + u * kLanes);
  for (int64_t t = 0; t < kLanes; ++t)
    for (int u = 0; u < U; ++u) {
      const Floats x = load(values + t * d + c + u * kLanes);
      for (int r = 0; r < R; ++r) sums[u][r] = fma(Floats{} + weights[r * stride + t], x, sums[u][r]);
    }
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) *reinterpret_cast<Floats*>(out + r * d + c + u * kLanes) = sums[u][r];
}

// Call what(R) with an integral constant, R of `rows` query rows.
template <int R = kRows, typename Do>
inline void with_rows(int64_t rows, Do&& what) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, what);
  what(std::integral_constant<int, R>{});
}

// Out of line, as `mix_tile`: a variant for each R, of which one copy is enough to compile.
__attribute__((noinline)) void score_tile(const float* q, const Floats* keys, int64_t rows, int64_t d, Floats* scores) {
  for (int64_t m = 0; m < rows; m += kRows)
    with_rows(rows - m, [&](auto R) { score_rows<R>(q + m * d, keys, d, scores + m); });
}

__attribute__((noinline)) void mix_tile(const float* weights, int64_t stride, const float* values, int64_t rows,
                                        int64_t d, float* out) {
  const int64_t whole = d / kLanes * kLanes, most = d / (kAtOnce * kLanes) * kAtOnce * kLanes;
  for (int64_t m = 0; m < rows; m += kRows)
    with_rows(rows - m, [&](auto R) {
      for (int64_t c = 0; c < most; c += kAtOnce * kLanes)
        mix_rows<R, kAtOnce>(weights + m * stride, stride, values, d, c, out + m * d);
      for (int64_t c = most; c < whole; c += kLanes)
        mix_rows<R, 1>(weights + m * stride, stride, values, d, c, out + m * d);
    });
  for (int64_t c = whole; c < d; ++c)
    for (int64_t m = 0; m < rows; ++m)
      for (int i = 0; i < kLanes; ++i) out[m * d + c] += weights[m * stride + i] * values[i * d + c];
}

}  // namespace
