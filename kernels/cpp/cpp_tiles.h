// Tiles of sixteen tokens: what a step's attention (cpp_attention.h) does with one, whatever tier it is from.

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Codes, one byte of each of sixteen.
typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));

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

// In two steps: gcc moves bytes one by one where they become 32 bits in one.
inline Ints widened(Bytes packed) {
  return __builtin_convertvector(__builtin_convertvector(packed, Halves), Ints);
}

template <int bits>
inline Floats decode(Ints packed, int plane) {
  return __builtin_convertvector((packed >> (plane * bits)) & ((1 << bits) - 1), Floats);
}

// A token's codes, one level in each float: plane p holds the channels p·width + byte. Whole vectors are read and written,
// up to fifteen bytes and floats past the token. A plane's last vector is written first, and the next plane's first
// vector overwrites its excess.
template <int bits>
inline void unpack(const uint8_t* codes, int64_t width, float* value) {
  if (bits < 8 && width == kLanes / 2) {  // two planes fill a vector
    uint64_t all;
    std::memcpy(&all, codes, sizeof all);
    typedef uint64_t Twice __attribute__((vector_size(kLanes)));
    const Ints second = {0, 0, 0, 0, 0, 0, 0, 0, bits, bits, bits, bits, bits, bits, bits, bits};
    const Ints packed = widened(bits_of<Bytes>(Twice{all, all})) >> second;
    for (int plane = 0; plane < 8 / bits; plane += 2)
      *reinterpret_cast<Floats*>(value + plane * width) = decode<bits>(packed, plane);
    return;
  }
  for (int64_t j = (width - 1) / kLanes * kLanes; j >= 0; j -= kLanes) {
    const Ints packed = widened(*reinterpret_cast<const Bytes*>(codes + j));
    for (int plane = 0; plane < 8 / bits; ++plane)
      *reinterpret_cast<Floats*>(value + plane * width + j) = decode<bits>(packed, plane);
  }
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, Bytes{__VA_ARGS__})
#endif

// Transpose sixteen rows of sixteen bytes, `stride` apart: each round interleaves two halves.
inline void transpose(const uint8_t* from, int64_t stride, Bytes* columns) {
  Bytes rows[kLanes];
  for (int i = 0; i < kLanes; ++i) columns[i] = *reinterpret_cast<const Bytes*>(from + i * stride);
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < kLanes; ++i) rows[i] = columns[i];
    for (int i = 0; i < kLanes / 2; ++i) {
      const Bytes a = rows[i], b = rows[i + kLanes / 2];
      columns[2 * i] = SHUFFLED(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      columns[2 * i + 1] = SHUFFLED(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
  }
}

// Levels of sixteen tokens' codes, `stride` bytes apart: tile[p·width + j] of byte j's plane p. Whole vectors are read, up
// to fifteen bytes past a token.
template <int bits>
inline void decode_tile(const uint8_t* codes, int64_t stride, int64_t width, Floats* tile) {
  for (int64_t j = 0; j < width; j += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, width - j);
#if LOOKS_UP
    if constexpr (bits <= 4) {
      Floats levels;
      for (int i = 0; i < kLanes; ++i) levels[i] = i & ((1 << bits) - 1);
      Words words[4];
      words_of(codes + j, stride, words);
      for (int64_t word = 0; word * 4 < count; ++word)
#pragma GCC unroll 4
        for (int byte = 0; byte < 4; ++byte) {
          if (word * 4 + byte >= count) break;
#pragma GCC unroll 8
          for (int plane = 0; plane < 8 / bits; ++plane)
            tile[plane * width + j + word * 4 + byte] = looked_up(levels, words[word] >> (8 * byte + bits * plane));
        }
      continue;
    }
#endif
    Bytes columns[kLanes];
    transpose(codes + j, stride, columns);
    for (int64_t i = 0; i < count; ++i) {
      const Ints packed = widened(columns[i]);
      for (int plane = 0; plane < 8 / bits; ++plane) tile[plane * width + j + i] = decode<bits>(packed, plane);
    }
  }
}

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

// Tiles of tokens, or vectors of channels, whose sums are in registers at once: with few query rows one has too few
// sums for a processor that begins two in a cycle and takes four for each.
constexpr int kAtOnce = LOOKS_UP ? 2 : 1;

// scores[u·rows + r][16 tokens] = Σ_c q[r][c]·keys[u·d + c][16 tokens], for U tiles: R query rows in registers, one load
// an element.
template <int R, int U>
inline void score_rows(const float* q, const Floats* keys, int64_t rows, int64_t d, Floats* scores) {
  Floats sums[U][R] = {};
  for (int64_t c = 0; c < d; ++c)
    for (int u = 0; u < U; ++u) {
      const Floats x = keys[u * d + c];
      for (int r = 0; r < R; ++r) sums[u][r] += q[r * d + c] * x;
    }
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) scores[u * rows + r] = sums[u][r];
}

// out[r][c..c+16·U] += Σ_t weights[r][t]·values[t][c..c+16·U], for a tile of tokens.
template <int R, int U>
inline void mix_rows(const float* weights, int64_t stride, const float* values, int64_t d, int64_t c, float* out) {
  Floats sums[U][R];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) sums[u][r] = load(out + r * d + c + u * kLanes);
  for (int64_t t = 0; t < kLanes; ++t)
    for (int u = 0; u < U; ++u) {
      const Floats x = load(values + t * d + c + u * kLanes);
      for (int r = 0; r < R; ++r) sums[u][r] += weights[r * stride + t] * x;
    }
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r) *reinterpret_cast<Floats*>(out + r * d + c + u * kLanes) = sums[u][r];
}

// Calls f<R> for blocks of at most eight of `rows` query rows.
#define FOR_ROW_BLOCKS(rows, m, call)                    \
  for (int64_t m = 0; m < (rows); m += 8) {              \
    switch (std::min<int64_t>(8, (rows) - m)) {          \
      case 1: { constexpr int R = 1; call; break; }      \
      case 2: { constexpr int R = 2; call; break; }      \
      case 3: { constexpr int R = 3; call; break; }      \
      case 4: { constexpr int R = 4; call; break; }      \
      case 5: { constexpr int R = 5; call; break; }      \
      case 6: { constexpr int R = 6; call; break; }      \
      case 7: { constexpr int R = 7; call; break; }      \
      default: { constexpr int R = 8; call; }            \
    }                                                    \
  }

// Out of line, as `mix_tile`: eight variants each, of which one copy is enough to compile.
template <int U>
__attribute__((noinline)) void score_tile(const float* q, const Floats* keys, int64_t rows, int64_t d, Floats* scores) {
  FOR_ROW_BLOCKS(rows, m, (score_rows<R, U>(q + m * d, keys, rows, d, scores + m)))
}

__attribute__((noinline)) void mix_tile(const float* weights, int64_t stride, const float* values, int64_t rows,
                                        int64_t d, float* out) {
  int64_t c = 0;
  for (; c + kAtOnce * kLanes <= d; c += kAtOnce * kLanes)
    FOR_ROW_BLOCKS(rows, m, (mix_rows<R, kAtOnce>(weights + m * stride, stride, values, d, c, out + m * d)))
  for (; c + kLanes <= d; c += kLanes)
    FOR_ROW_BLOCKS(rows, m, (mix_rows<R, 1>(weights + m * stride, stride, values, d, c, out + m * d)))
  for (; c < d; ++c)
    for (int64_t m = 0; m < rows; ++m)
      for (int i = 0; i < kLanes; ++i) out[m * d + c] += weights[m * stride + i] * values[i * d + c];
}

}  // namespace
