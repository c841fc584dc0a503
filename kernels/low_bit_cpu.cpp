// Attention over the low-bit tier on a CPU, one pass over the packed keys, one over the values (see low_bit_cpu.py
// for the shapes).
//
// Keys: q is multiplied by a group's scales once, and q·zero added once a group, so that an element costs a shift, a
// mask, a conversion and one multiply-add for each query row. Values: a token's codes are unpacked and scaled once, then
// added into every query row. Bytes read: n·(2·d·bits/8) of codes, and the scales; FLOPs: 4·n·d for each query row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

// exp(x) for x <= 0, to about two units in the last place; written so that the compiler makes vectors of it.
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
  int32_t exponent = (static_cast<int32_t>(turns) + 127) << 23;
  float power;
  std::memcpy(&power, &exponent, sizeof power);
  return y * power;
}

// Sixteen lanes of a vector, whatever the machine's registers are: the compiler splits them.
constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));

template <int bits>
inline Floats decode(Bytes packed, int plane) {
  Ints codes = __builtin_convertvector(packed, Ints);
  return __builtin_convertvector((codes >> (plane * bits)) & ((1 << bits) - 1), Floats);
}

// scores[r][16 tokens] = Σ_c q[r][c]·codes[c][16 tokens]: R query rows in registers, one load an element.
template <int R>
inline void score_rows(const float* q, const Floats* codes, int64_t d, Floats* scores) {
  Floats sums[R] = {};
  for (int64_t c = 0; c < d; ++c) {
    const Floats x = codes[c];
    for (int r = 0; r < R; ++r) sums[r] += q[r * d + c] * x;
  }
  for (int r = 0; r < R; ++r) scores[r] = sums[r];
}

// out[r][c..c+16] += Σ_t weights[r][t]·values[t][c..c+16], for `count` tokens.
template <int R>
inline void mix_rows(const float* weights, int64_t stride, const float* values, int64_t d, int64_t c, int64_t count,
                     float* out) {
  Floats sums[R];
  for (int r = 0; r < R; ++r) sums[r] = *reinterpret_cast<const Floats*>(out + r * d + c);
  for (int64_t t = 0; t < count; ++t) {
    const Floats x = *reinterpret_cast<const Floats*>(values + t * d + c);
    for (int r = 0; r < R; ++r) sums[r] += weights[r * stride + t] * x;
  }
  for (int r = 0; r < R; ++r) *reinterpret_cast<Floats*>(out + r * d + c) = sums[r];
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

// Tokens that one thread takes at a time; a multiple of every group size.
constexpr int64_t kSplit = 1024;

template <int bits>
void score(const float* q, const uint8_t* codes, const float* key_params, const float* bias,
           const int64_t* bias_strides, int64_t batch, int64_t heads, int64_t group_heads, int64_t lanes, int64_t d,
           int64_t n, int64_t capacity, int64_t group, int64_t row_bytes, float softcap, float* logits) {
  const int64_t rows = group_heads * lanes, width = d * bits / 8, splits = (n + kSplit - 1) / kSplit;
  const int64_t key_groups = capacity / group;

#pragma omp parallel for schedule(static)
  for (int64_t job = 0; job < batch * heads * splits; ++job) {
    const int64_t head = job / splits, start = job % splits * kSplit, stop = std::min(n, start + kSplit);
    const int64_t b = head / heads, h = head % heads;
    // Tokens come in groups of at least 32, and n is whole groups: a tile of 16 is always full.
    std::vector<float> tile_memory(d * kLanes), score_memory(rows * kLanes);
    std::vector<uint8_t> bytes(width * kLanes);
    Floats* tile = reinterpret_cast<Floats*>(tile_memory.data());
    Floats* scores = reinterpret_cast<Floats*>(score_memory.data());
    const Bytes* turned = reinterpret_cast<const Bytes*>(bytes.data());
    std::vector<float> scaled(rows * d), base(rows);

    for (int64_t t = start; t < stop; t += kLanes) {
      if (t % group == 0) {
        const float* scale = key_params + (head * key_groups + t / group) * 2 * d;
        const float* zero = scale + d;
        for (int64_t m = 0; m < rows; ++m) {
          const float* query = q + (head * rows + m) * d;
          float offset = 0.0f;
          for (int64_t c = 0; c < d; ++c) {
            scaled[m * d + c] = query[c] * scale[c];
            offset += query[c] * zero[c];
          }
          base[m] = offset;
        }
      }
      for (int i = 0; i < kLanes; ++i) {
        const uint8_t* token = codes + (head * capacity + t + i) * row_bytes;
        for (int64_t j = 0; j < width; ++j) bytes[j * kLanes + i] = token[j];
      }
      for (int plane = 0; plane < 8 / bits; ++plane)
        for (int64_t j = 0; j < width; ++j) tile[plane * width + j] = decode<bits>(turned[j], plane);
      FOR_ROW_BLOCKS(rows, m, score_rows<R>(scaled.data() + m * d, tile, d, scores + m))
      for (int64_t m = 0; m < rows; ++m) {
        Floats x = scores[m] + base[m];
        if (softcap > 0)
          for (int i = 0; i < kLanes; ++i) x[i] = std::tanh(x[i] / softcap) * softcap;
        if (bias) {
          const int64_t g = m / lanes, l = m % lanes;
          const float* first = bias + b * bias_strides[0] + h * bias_strides[1] + g * bias_strides[2] + l * bias_strides[3];
          for (int i = 0; i < kLanes; ++i) x[i] += first[(t + i) * bias_strides[4]];
        }
        *reinterpret_cast<Floats*>(logits + (head * rows + m) * n + t) = x;
      }
    }
  }
}

template <int bits>
void mix(const float* logits, const uint8_t* codes, const float* value_params, int64_t batch, int64_t heads,
         int64_t rows, int64_t d, int64_t n, int64_t capacity, int64_t channels, int64_t row_bytes, float* out,
         float* peaks, float* totals) {
  const int64_t width = d * bits / 8, splits = (n + kSplit - 1) / kSplit, value_groups = d / channels;
  const float nothing = -std::numeric_limits<float>::infinity();
  std::vector<float> part_out(batch * heads * splits * rows * d), part_peak(batch * heads * splits * rows, nothing),
      part_total(batch * heads * splits * rows);

#pragma omp parallel for schedule(static)
  for (int64_t job = 0; job < batch * heads * splits; ++job) {
    const int64_t head = job / splits, start = job % splits * kSplit, stop = std::min(n, start + kSplit);
    std::vector<float> weights(rows * kSplit), values(kLanes * d);
    float* my_out = part_out.data() + job * rows * d;
    float* my_peak = part_peak.data() + job * rows;
    float* my_total = part_total.data() + job * rows;

    for (int64_t m = 0; m < rows; ++m) {
      const float* row = logits + (head * rows + m) * n + start;
      float* weight = weights.data() + m * kSplit;
      float top = nothing, total = 0.0f;
      for (int64_t t = 0; t < stop - start; ++t) top = std::max(top, row[t]);
      if (top == nothing) {
        std::fill_n(weight, stop - start, 0.0f);
      } else {
        for (int64_t t = 0; t < stop - start; ++t) weight[t] = exponential(row[t] - top);
        for (int64_t t = 0; t < stop - start; ++t) weight[t] = row[t] == nothing ? 0.0f : weight[t];
        for (int64_t t = 0; t < stop - start; ++t) total += weight[t];
      }
      my_peak[m] = top;
      my_total[m] = total;
    }

    for (int64_t t = start; t < stop; t += kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        // A token's values lie behind its keys.
        const uint8_t* token = codes + (head * capacity + t + i + 1) * row_bytes - width;
        float* value = values.data() + i * d;
        for (int plane = 0; plane < 8 / bits; ++plane) {
          int64_t j = 0;
          for (; j + kLanes <= width; j += kLanes)
            *reinterpret_cast<Floats*>(value + plane * width + j) =
                decode<bits>(*reinterpret_cast<const Bytes*>(token + j), plane);
          for (; j < width; ++j)
            value[plane * width + j] = static_cast<float>((token[j] >> (plane * bits)) & ((1 << bits) - 1));
        }
        const float* scale = value_params + (head * capacity + t + i) * 2 * value_groups;
        for (int64_t v = 0; v < value_groups; ++v)
          for (int64_t c = v * channels; c < (v + 1) * channels; ++c)
            value[c] = value[c] * scale[v] + scale[value_groups + v];
      }
      const float* weight = weights.data() + t - start;
      int64_t c = 0;
      for (; c + kLanes <= d; c += kLanes)
        FOR_ROW_BLOCKS(rows, m, mix_rows<R>(weight + m * kSplit, kSplit, values.data(), d, c, kLanes, my_out + m * d))
      for (; c < d; ++c)
        for (int64_t m = 0; m < rows; ++m)
          for (int i = 0; i < kLanes; ++i) my_out[m * d + c] += weight[m * kSplit + i] * values[i * d + c];
    }
  }

  for (int64_t row = 0; row < batch * heads * rows; ++row) {
    const int64_t head = row / rows, m = row % rows;
    float top = nothing, total = 0.0f;
    for (int64_t s = 0; s < splits; ++s) top = std::max(top, part_peak[(head * splits + s) * rows + m]);
    std::fill_n(out + row * d, d, 0.0f);
    for (int64_t s = 0; s < splits && top > nothing; ++s) {
      const int64_t part = (head * splits + s) * rows + m;
      if (part_total[part] == 0.0f) continue;
      const float shrink = exponential(part_peak[part] - top);
      total += part_total[part] * shrink;
      for (int64_t c = 0; c < d; ++c) out[row * d + c] += part_out[part * d + c] * shrink;
    }
    peaks[row] = top;
    totals[row] = total;
  }
}

}  // namespace

extern "C" void score_low_bit(const float* q, const uint8_t* codes, const float* key_params, const float* bias,
                              const int64_t* bias_strides, int64_t batch, int64_t heads, int64_t group_heads,
                              int64_t lanes, int64_t d, int64_t n, int64_t capacity, int64_t group, int64_t row_bytes,
                              int64_t bits, float softcap, float* logits) {
  auto run = bits == 1 ? score<1> : bits == 2 ? score<2> : bits == 4 ? score<4> : score<8>;
  run(q, codes, key_params, bias, bias_strides, batch, heads, group_heads, lanes, d, n, capacity, group, row_bytes,
      softcap, logits);
}

extern "C" void mix_low_bit(const float* logits, const uint8_t* codes, const float* value_params, int64_t batch,
                            int64_t heads, int64_t rows, int64_t d, int64_t n, int64_t capacity, int64_t channels,
                            int64_t row_bytes, int64_t bits, float* out, float* peaks, float* totals) {
  auto run = bits == 1 ? mix<1> : bits == 2 ? mix<2> : bits == 4 ? mix<4> : mix<8>;
  run(logits, codes, value_params, batch, heads, rows, d, n, capacity, channels, row_bytes, out, peaks, totals);
}
