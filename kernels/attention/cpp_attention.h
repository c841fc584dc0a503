// A decode step's attention over some tokens of one head. cpp/library.py declares `StepArguments` and its shapes.
//
// Low-bit keys: q is multiplied by a group's scales once, and q·zero added once a group, so that an element costs a
// shift, a mask, a conversion and one multiply-add for each query row. Low-bit values: a token's codes are unpacked and
// scaled once, then added into every query row. Rotated pairs stay rotated: the query is rotated before, the sum after.
// Bytes read per low-bit token: its codes and scales, once. FLOPs: 4·d per query row.

#include <vector>

namespace {

// An additive mask hides a token with its dtype's minimum; float16's is the closest to 0 (`attention_ops.SEEN`).
constexpr float kSeen = -65504.0f / 2;
// Low-bit tokens per job; a multiple of every group size, and those of a page (`page_table.py`).
constexpr int64_t kChunk = 256;
// Multiply-adds below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 17;

// A 16-bit pair: its address, its column of the mask, and the first lane that sees it.
struct Pair {
  const T* key;
  const T* value;
  int64_t token, first_lane;
};

// Attention over some of the tokens, for each query row: peak, Σ exp(l - peak), Σ exp(l - peak)·v[d].
struct Part {
  float* peak;
  float* total;
  float* out;
};

struct Parts {
  int64_t rows, d;
  std::vector<float> peaks, totals, outs;
  Parts(int64_t count, int64_t rows, int64_t d)
      : rows(rows), d(d), peaks(count * rows, kNothing), totals(count * rows), outs(count * rows * d) {}
  Part operator[](int64_t i) { return {&peaks[i * rows], &totals[i * rows], outs.data() + i * rows * d}; }
};

// Values derived from a step's cursor and shapes.
struct Attention {
  const StepArguments& s;
  const int64_t rows, pairs, most, chunks;  // most: tokens of the fullest low-bit tier
  std::vector<float> query, turned;  // [B·H, rows, d], scaled; the second as the low-bit tier is stored

  explicit Attention(const StepArguments& step)
      : s(step), rows(s.group_heads * s.lanes), pairs(s.batch * s.heads), most(fullest(s)),
        chunks((most + kChunk - 1) / kChunk), query(pairs * rows * s.d) {
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<const T*>(s.q)[i] * s.scale;
    turned = query;
    if (s.rotation)
      for (int64_t row = 0; row < pairs * rows; ++row) rotate(turned.data() + row * s.d, s.d, s.rotation);
  }

  // Lengths of each batch row, indexed by head; negative lengths (`cursor.py`) count as 0.
  const int64_t* cursor(int64_t head) const { return s.cursor + head / s.heads * (4 + s.pages); }
  int64_t length(int64_t head) const { return std::max<int64_t>(cursor(head)[0], 0); }
  int64_t low_bit(int64_t head) const { return cursor(head)[1]; }
  int64_t candidates(int64_t head) const { return std::min(cursor(head)[2], length(head)); }
  static int64_t fullest(const StepArguments& s) {
    int64_t found = 0;
    for (int64_t row = 0; row < s.batch; ++row) found = std::max(found, s.cursor[row * (4 + s.pages) + 1]);
    return found;
  }
  // Index of a head's token in the low-bit tier, among all heads' tokens; the tokens of one chunk are contiguous.
  int64_t place(int64_t head, int64_t token) const {
    if (!s.pages) return head * s.capacity + token;
    return (cursor(head)[4 + token / kChunk] * s.heads + head % s.heads) * kChunk + token % kChunk;
  }

  int64_t jobs() const { return pairs * (chunks + 1); }
  bool worth_threads() const { return (most + s.window) * pairs * rows * s.d > kWorthThreads; }
  float* logits_of(int64_t head) const { return s.logits + head * rows * s.capacity; }

  float bias(int64_t head, int64_t row, int64_t token) const {
    if (!s.bias) return 0.0f;
    const int64_t* stride = s.bias_strides;
    return s.bias[head / s.heads * stride[0] + head % s.heads * stride[1] + row / s.lanes * stride[2] +
                  row % s.lanes * stride[3] + token * stride[4]];
  }

  Floats capped(Floats x) const {
    if (s.softcap > 0)
      for (int i = 0; i < kLanes; ++i) x[i] = std::tanh(x[i] / s.softcap) * s.softcap;
    return x;
  }

  int64_t pair_size() const { return 2 * s.d; }
  Pair pair_at(const T* at, int64_t token) const { return {at, at + s.d, token, 0}; }

  // Call what(i, token) for each sink i of a head among the tokens first..stop.
  template <typename Do>
  void each_sink(int64_t head, int64_t first, int64_t stop, Do&& what) const {
    const int32_t* index = s.sink_index + head / s.heads * s.sink_tokens;
    for (int64_t i = 0; i < s.sink_tokens; ++i)
      if (index[i] >= first && index[i] < stop) what(i, index[i]);
  }

  // Pairs in the window, of the new tokens, and of the sinks in the low-bit tier.
  std::vector<Pair> recent_pairs(int64_t head) const {
    std::vector<Pair> found;
    const T* ring = static_cast<const T*>(s.recent) + head * s.window * pair_size();
    for (int64_t t = low_bit(head); t < length(head); ++t) found.push_back(pair_at(ring + t % s.window * pair_size(), t));
    const T *k = static_cast<const T*>(s.k), *v = static_cast<const T*>(s.v);
    for (int64_t l = 0; l < s.lanes; ++l) {
      const int64_t at = (head * s.lanes + l) * s.d;
      found.push_back({k + at, v ? v + at : nullptr, length(head), l});
    }
    const T* sinks = static_cast<const T*>(s.sink_pairs) + head * s.sink_tokens * pair_size();
    each_sink(head, 0, low_bit(head),
              [&](int64_t i, int64_t token) { found.push_back(pair_at(sinks + i * pair_size(), token)); });
    return found;
  }

  // The slots that hold a pair of the low-bit tier.
  std::vector<Pair> slot_pairs(int64_t head) const {
    std::vector<Pair> found;
    const T* slots = static_cast<const T*>(s.slots) + head * s.top_k * pair_size();
    const int32_t* index = s.slot_index + head * s.top_k;
    for (int64_t i = 0; i < s.top_k; ++i)
      if (index[i] >= 0 && index[i] < low_bit(head)) found.push_back(pair_at(slots + i * pair_size(), index[i]));
    return found;
  }

  // Logits [rows][stride] of a head's query rows and some pairs in 16 bits; stride: their number, in whole tiles.
  std::vector<float> exact_logits(int64_t head, const std::vector<Pair>& of, int64_t stride) const {
    std::vector<float> tile_memory(s.d * kLanes), score_memory(rows * kLanes), logits(rows * stride, kNothing);
    Floats* tile = reinterpret_cast<Floats*>(tile_memory.data());
    Floats* scores = reinterpret_cast<Floats*>(score_memory.data());
    const int64_t count = of.size();
    for (int64_t t = 0; t < count; t += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* key = of[std::min(t + i, count - 1)].key;
        for (int64_t c = 0; c < s.d; ++c) tile[c][i] = key[c];
      }
      score_tile<1>(&query[head * rows * s.d], tile, rows, s.d, scores);
      for (int64_t m = 0; m < rows; ++m) {
        const Floats x = capped(scores[m]);
        for (int64_t i = 0; i < kLanes && t + i < count; ++i)
          if (m % s.lanes >= of[t + i].first_lane)
            logits[m * stride + t + i] = x[i] + bias(head, m, of[t + i].token);
      }
    }
    return logits;
  }

  // The codes of a tile of tokens, the first of them number `row` of all heads', so that a vector may be read from any byte
  // of them: the last ones are copied.
  const uint8_t* codes_at(int64_t row, std::vector<uint8_t>& copy) const {
    const int64_t after = s.places - row - kLanes;
    const uint8_t* codes = static_cast<const uint8_t*>(s.codes) + row * s.row_width;
    if (after * s.row_width >= kLanes) return codes;
    copy.assign(codes, codes + kLanes * s.row_width);
    copy.resize(copy.size() + kLanes);
    return copy.data();
  }

  // Scales and zero points of the group of keys that a token is of, number `row` of all heads'.
  Params key_params(int64_t row) const { return {s.key_params, row / s.group * 2 * s.d, s.param_bits == 8}; }

  // Logits of one chunk of a head's low-bit tier, into s.logits; none of the sinks.
  template <int bits>
  void chunk_logits(int64_t head, int64_t start) const {
    const int64_t d = s.d, stop = std::min(low_bit(head), start + kChunk), width = bits < 16 ? d * bits / 8 : d;
    if (start >= stop) return;  // of a shorter row
    const int64_t first_place = place(head, start) - start;
    std::vector<float> tile_memory(kAtOnce * d * kLanes), score_memory(kAtOnce * rows * kLanes);
    std::vector<float> scaled(rows * d), base(rows), scales(d), zeros(d);
    std::vector<uint8_t> copy, levels(kLanes * 2 * width + kLanes);
    Floats* tile = reinterpret_cast<Floats*>(tile_memory.data());
    Floats* scores = reinterpret_cast<Floats*>(score_memory.data());
    const float* q = turned.data() + head * rows * d;
    const bool in_trellis = bits == 1 && s.key_circle;
    if (bits == 16 || in_trellis) scaled.assign(q, q + rows * d);
    if (in_trellis)
      for (int64_t i = 0; i < rows * d; ++i) base[i / d] -= 1.5f * q[i];

    // Tokens come in groups of at least 32, and the tier is whole groups: two tiles are always full.
    for (int64_t t = start; t < stop; t += kAtOnce * kLanes) {
      if constexpr (bits < 16) {
        if (t % s.group == 0 && !in_trellis) {
          key_params(first_place + t).read(d, scales.data(), zeros.data());
          for (int64_t m = 0; m < rows; ++m) {
            float offset = 0.0f;
            for (int64_t c = 0; c < d; ++c) {
              scaled[m * d + c] = q[m * d + c] * scales[c];
              offset += q[m * d + c] * zeros[c];
            }
            base[m] = offset;
          }
        }
        for (int u = 0; u < kAtOnce; ++u) {
          const uint8_t* codes = codes_at(first_place + t + u * kLanes, copy);
          if (in_trellis) {
            for (int i = 0; i < kLanes; ++i)
              expand(codes + i * s.row_width, width, s.key_circle, levels.data() + i * 2 * width);
            decode_tile<2>(levels.data(), 2 * width, 2 * width, tile + u * d);
          } else {
            decode_tile<bits>(codes, s.row_width, width, tile + u * d);
          }
        }
      } else {
        for (int i = 0; i < kAtOnce * kLanes; ++i) {
          const T* token = static_cast<const T*>(s.codes) + (first_place + t + i) * s.row_width;
          for (int64_t c = 0; c < d; ++c) tile[i / kLanes * d + c][i % kLanes] = token[c];
        }
      }
      score_tile<kAtOnce>(scaled.data(), tile, rows, d, scores);
      for (int u = 0; u < kAtOnce; ++u) {
        const int64_t first = t + u * kLanes;
        Floats by = Floats{} + 1.0f;
        if (in_trellis)
          for (int i = 0; i < kLanes; ++i) by[i] = Params{s.key_params, first_place + first, s.param_bits == 8}.scale(i);
        for (int64_t m = 0; m < rows; ++m) {
          Floats x = (scores[u * rows + m] + base[m]) * by;
          if (s.share_tokens > 1) x += s.shares[((head * rows + m) * most + first) / s.share_tokens];
          else if (s.shares) x += *reinterpret_cast<const Floats*>(s.shares + (head * rows + m) * most + first);
          x = capped(x);
          if (s.bias)
            for (int i = 0; i < kLanes; ++i) x[i] += bias(head, m, first + i);
          *reinterpret_cast<Floats*>(logits_of(head) + m * s.capacity + first) = x;
        }
      }
    }
    each_sink(head, start, stop, [&](int64_t, int64_t token) {
      for (int64_t m = 0; m < rows; ++m) logits_of(head)[m * s.capacity + token] = kNothing;
    });
  }

  // Decode the levels [d] of a token's value, number `row` of all heads'.
  void scale_values(int64_t row, float* value) const {
    const bool eight = s.param_bits == 8;
    if (s.circle) {
      const float by = Params{s.value_params, row, eight}.scale(0), zero = -1.5f * by;
      for (int64_t c = 0; c < s.d; ++c) value[c] = value[c] * by + zero;
      return;
    }
    const int64_t groups = s.d / s.channels;
    const Params params{s.value_params, row * 2 * groups, eight};
    for (int64_t v = 0; v < groups; ++v) {
      const float by = params.scale(v), zero = params.zero(groups + v, by);
      for (int64_t c = v * s.channels; c < (v + 1) * s.channels; ++c) value[c] = value[c] * by + zero;
    }
  }

  // Values [kLanes][d] of a tile of tokens, the first of them number `row` of all heads', from codes a token apart.
  template <int bits>
  void tile_values(const uint8_t* codes, int64_t row, int64_t width, uint8_t* levels, float* values) const {
    const int64_t d = s.d;
    if constexpr (bits == 1) {
#if LOOKS_UP
      if (s.circle == 32 && (width == 8 || width == 16)) {
        const Params params{s.value_params, row, s.param_bits == 8};
        const Floats by_window = levels_by_window();
        for (int i = 0; i < kLanes; ++i) {
          const Floats found = by_window * params.scale(i);
          if (width == 8) look_up<8>(codes + i * s.row_width, found, values + i * d);
          else look_up<16>(codes + i * s.row_width, found, values + i * d);
        }
        return;
      }
#endif
      if (s.circle)
        for (int i = 0; i < kLanes; ++i) expand(codes + i * s.row_width, width, s.circle, levels + i * 2 * width);
    }
    for (int i = 0; i < kLanes; ++i) {
      if (bits == 1 && s.circle) unpack<2>(levels + i * 2 * width, 2 * width, values + i * d);
      else unpack<bits>(codes + i * s.row_width, width, values + i * d);
    }
    for (int i = 0; i < kLanes; ++i) scale_values(row + i, values + i * d);
  }

  // Attention over one chunk of the low-bit tier from its logits, without the tokens whose pair is in the slots.
  template <int bits>
  void chunk_mix(int64_t head, int64_t start, Part part) const {
    const int64_t d = s.d, count = std::min(low_bit(head), start + kChunk) - start, width = bits < 16 ? d * bits / 8 : d;
    if (count <= 0) return;  // of a shorter row
    const int64_t first_place = place(head, start);
    std::vector<float> weights(rows * kChunk), values(kLanes * d + kLanes);
    std::vector<uint8_t> hidden(kChunk), copy, levels(kLanes * 2 * width + kLanes);
    const int32_t* index = s.slot_index + head * s.top_k;
    for (int64_t i = 0; i < s.top_k; ++i)
      if (index[i] >= start && index[i] < start + count) hidden[index[i] - start] = 1;
    for (int64_t m = 0; m < rows; ++m) {
      const float* row = logits_of(head) + m * s.capacity + start;
      float* weight = weights.data() + m * kChunk;
      float total = 0.0f;
      for (int64_t t = 0; t < count; ++t) weight[t] = hidden[t] ? kNothing : row[t];
      const float top = largest(weight, count);
      const float base = base_of(top);
      for (int64_t t = 0; t < count; ++t) weight[t] = weight_of(weight[t], base);
      for (int64_t t = 0; t < count; ++t) total += weight[t];
      part.peak[m] = top;
      part.total[m] = total;
    }
    for (int64_t t = 0; t < count; t += kLanes) {
      if constexpr (bits < 16) {
        // A token's value follows its key.
        const uint8_t* codes = codes_at(first_place + t, copy) + s.row_width - width;
        tile_values<bits>(codes, first_place + t, width, levels.data(), values.data());
      } else {
        for (int i = 0; i < kLanes; ++i) {
          const T* token = static_cast<const T*>(s.codes) + (first_place + t + i + 1) * s.row_width - width;
          for (int64_t c = 0; c < d; ++c) values[i * d + c] = token[c];
        }
      }
      mix_tile(weights.data() + t, kChunk, values.data(), rows, d, part.out);
    }
  }

  // Attention over 16-bit pairs. A weight of 0 does not remove values that are not finite, so tails of tiles are zeros.
  std::vector<float> exact_mix(int64_t head, const std::vector<Pair>& of, Part part) const {
    const int64_t count = of.size(), stride = (count + kLanes - 1) / kLanes * kLanes;
    std::vector<float> logits = exact_logits(head, of, stride), weights(logits.size()), values(kLanes * s.d);
    for (int64_t m = 0; m < rows; ++m) {
      const float* row = logits.data() + m * stride;
      float total = 0.0f;
      const float top = largest(row, stride);
      const float base = base_of(top);
      for (int64_t t = 0; t < stride; ++t) weights[m * stride + t] = weight_of(row[t], base);
      for (int64_t t = 0; t < stride; ++t) total += weights[m * stride + t];
      part.peak[m] = top;
      part.total[m] = total;
    }
    for (int64_t t = 0; t < stride; t += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i)
        for (int64_t c = 0; c < s.d; ++c) values[i * s.d + c] = t + i < count ? static_cast<float>(of[t + i].value[c]) : 0.0f;
      mix_tile(weights.data() + t, stride, values.data(), rows, s.d, part.out);
    }
    return logits;
  }

  // A row's maximum and 1/Σ exp over all its head's parts and its sink; a fully masked row gives 0.
  void denominator(const Parts& parts, int64_t head, int64_t m, float* peak, float* share) const {
    const int64_t first = head * (chunks + 1);
    const float sink = s.sinks ? s.sinks[head % s.heads * s.group_heads + m / s.lanes] : kNothing;
    float top = sink, total = 0.0f;
    for (int64_t i = 0; i <= chunks; ++i) top = std::max(top, parts.peaks[(first + i) * rows + m]);
    const float base = base_of(top);
    for (int64_t i = 0; i <= chunks; ++i)
      total += parts.totals[(first + i) * rows + m] * weight_of(parts.peaks[(first + i) * rows + m], base);
    total += weight_of(sink, base);
    *peak = base;
    *share = total == 0.0f ? 0.0f : 1.0f / total;
  }

  // All parts of a head, merged: s.out, each row's peak and 1/Σ exp.
  void merge(Parts& parts, int64_t head, float* peaks, float* shares) const {
    std::vector<float> sum(s.d);
    float* out = sum.data();
    for (int64_t m = 0; m < rows; ++m) {
      denominator(parts, head, m, peaks + m, shares + m);
      std::fill_n(out, s.d, 0.0f);
      for (int64_t i = 0; i <= chunks; ++i) {
        Part part = parts[head * (chunks + 1) + i];
        if (i == chunks && s.rotation) rotate(out, s.d, s.rotation);  // the sum of the low-bit tier's parts
        if (part.total[m] == 0.0f) continue;
        const float shrink = weight_of(part.peak[m], peaks[m]) * shares[m];
        for (int64_t c = 0; c < s.d; ++c) out[c] += part.out[m * s.d + c] * shrink;
      }
      for (int64_t c = 0; c < s.d; ++c) store(out[c], static_cast<T*>(s.out) + (head * rows + m) * s.d + c);
    }
  }

  // scores[token - first] = the attention of one lane, summed over the query group, where the mask shows a candidate to
  // any query head and it is no sink, else -1; from logits[row][token - first].
  void candidate_scores(int64_t head, int64_t lane, const float* logits, int64_t stride, int64_t first, int64_t stop,
                        const float* peaks, const float* shares, float* scores) const {
    const int64_t count = std::min(stop, candidates(head)) - first;
    if (count <= 0) return;
    std::fill_n(scores, count, 0.0f);
    for (int64_t g = 0; g < s.group_heads; ++g) {
      const int64_t m = g * s.lanes + lane;
      const float* row = logits + m * stride;
      const float peak = peaks[m], share = shares[m];
      for (int64_t t = 0; t < count; ++t) scores[t] += weight_of(row[t], peak) * share;
    }
    for (int64_t t = 0; s.bias && t < count; ++t) {
      bool seen = false;
      for (int64_t g = 0; g < s.group_heads; ++g) seen = seen || bias(head, g * s.lanes + lane, first + t) > kSeen;
      if (!seen) scores[t] = -1.0f;
    }
    each_sink(head, first, first + count, [&](int64_t, int64_t token) { scores[token - first] = -1.0f; });
  }

  float* scores_of(int64_t lane, int64_t head) const { return s.scores + (lane * pairs + head) * s.capacity; }
};

}  // namespace
