// A decode step's attention over some tokens of one head. cpp/library.py declares `StepArguments` and its shapes.
//
// Low-bit keys: q is multiplied by a group's scales once, and q·zero added once a group. Low-bit values: weights are
// multiplied by the tokens' scales. Rotated pairs stay rotated: the query is rotated before, the sum after.
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
  const KeyOrder key_order;
  const ValueOrder value_order;
  std::vector<float> query, turned;  // [B·H, rows, d], scaled; the second as the low-bit tier is stored
  std::vector<float> in_params_order, in_lanes;  // the turned query [B·H, rows, dim], and in the order of `score_words`
  std::vector<uint16_t> param_place, param_of_lane;  // of a channel, and of the query's lanes

  explicit Attention(const StepArguments& step)
      : s(step), rows(s.group_heads * s.lanes), pairs(s.batch * s.heads), most(fullest(s)),
        chunks((most + kChunk - 1) / kChunk), key_order(s.dim, std::min<int64_t>(s.key_bits, 4), s.key_trellis),
        value_order(s.dim, std::min<int64_t>(s.value_bits, 4), s.value_trellis), query(pairs * rows * s.d) {
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<const T*>(s.q)[i] * s.scale;
    turned = query;
    if (s.rotation)
      for (int64_t row = 0; row < pairs * rows; ++row) rotate(turned.data() + row * s.d, s.d, s.rotation);
    arrange_query();
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

  // The codes of a token's record, by the token's number `row` among all heads'.
  const uint8_t* record_at(int64_t row) const {
    return static_cast<const uint8_t*>(s.codes) + row / kRecord * kRecord * s.row_width;
  }
  const T* pair_in_16_bits(int64_t row) const { return static_cast<const T*>(s.codes) + row * s.row_width; }

  // Bring the turned query into the order of params and, for fragments, of lanes.
  void arrange_query() {
    const int64_t block = std::min<int64_t>(s.dim, 64), size = key_order.channel.size();
    for (int64_t c = 0; c < s.dim; ++c) {
      const int64_t i = c % block, place = c - i + i % 8 / 2 * (block / 4) + i / 16 * 4 + i % 2 * 2 + i / 8 % 2;
      param_place.push_back(s.key_bits < 8 ? place : c);
    }
    in_params_order.resize(pairs * rows * s.dim);
    for (int64_t row = 0; row < pairs * rows; ++row)
      for (int64_t c = 0; c < s.d; ++c) in_params_order[row * s.dim + param_place[c]] = turned[row * s.d + c];
    if (s.key_bits >= 8) return;
    for (const uint16_t channel : key_order.channel) param_of_lane.push_back(param_place[channel]);
    in_lanes.resize(pairs * rows * size);
    float* to = in_lanes.data();
    for (int64_t head = 0; head < pairs; ++head)
      for_lanes([&](int64_t row, int64_t i) { *to++ = in_params_order[(head * rows + row) * s.dim + param_of_lane[i]]; });
  }

  // Call what(row, i) for the lanes i of a head's query, in the order of `score_words` and in blocks of kRows rows.
  template <typename Do>
  void for_lanes(Do&& what) const {
    for (int64_t first = 0; first < rows; first += kRows)
      for (size_t i = 0; i < param_of_lane.size(); i += kLanes)
        for (int64_t row = first; row < std::min(first + kRows, rows); ++row)
          for (int64_t lane = 0; lane < kLanes; ++lane) what(row, i + lane);
  }

  // Multiply a head's query by the scales of the group of keys that begins at `row`, and by its zero points.
  void scale_query(int64_t head, int64_t row, std::vector<float>& scaled, std::vector<float>& base) const {
    std::vector<float> scales(s.dim), zeros(s.dim), by(param_of_lane.size());
    Params{s.key_params, row / s.group * 2 * s.dim, s.param_bits == 8}.read(s.dim, scales.data(), zeros.data());
    const float* q = &in_params_order[head * rows * s.dim];
    for (int64_t m = 0; m < rows; ++m) {
      float sum = 0.0f;
      for (int64_t c = 0; c < s.dim; ++c) sum += q[m * s.dim + c] * zeros[c];
      base[m] = sum;
    }
    if (s.key_bits == 8)
      for (int64_t i = 0; i < rows * s.d; ++i) scaled[i] = turned[head * rows * s.d + i] * scales[i % s.d];
    for (size_t i = 0; i < by.size(); ++i) by[i] = scales[param_of_lane[i]];
    const float* from = in_lanes.data() + head * rows * by.size();
    float* to = scaled.data();
    for (int64_t first = 0; first < rows && !by.empty(); first += kRows)
      for (size_t i = 0; i < by.size(); i += kLanes)
        for (int64_t row = first; row < std::min(first + kRows, rows); ++row, from += kLanes, to += kLanes)
          *reinterpret_cast<Floats*>(to) = load(from) * load(&by[i]);
  }

  // Products [rows][count] of the scaled query with the levels of `count` tokens from `row` on, in fragments.
  void score_fragments(const float* scaled, int64_t row, int64_t count, float* products) const {
    const KeyOrder& k = key_order;
    std::vector<uint32_t> memory(k.words());
    std::vector<float> sums(kRows * kQuads * k.sums());
    const uint32_t* words = k.whole(reinterpret_cast<const uint32_t*>(record_at(row)), memory.data());
    const int first = row % kRecord / 8, stop = first + count / 8, shares = k.per_token;
    for (int64_t m = 0; m < rows; m += kRows) {
      score_rows_of(k, words, first, stop, scaled + m * param_of_lane.size(), std::min(kRows, rows - m), sums.data());
      for (int64_t r = m; r < std::min(m + kRows, rows); ++r) {
        const float* from = &sums[((r - m) * kQuads + first) * k.sums()];
        float* to = products + r * count;
        if (shares == 2)
          for (int64_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
        else
          for (int64_t i = 0; i < count; ++i) {
            to[i] = 0.0f;
            for (int share = 0; share < shares; ++share) to[i] += from[i * shares + share];
          }
      }
    }
  }

  // The same for tokens in rows, of 8 or 16 bits.
  void score_tokens(const float* scaled, int64_t row, int64_t count, float* products) const {
    std::vector<float> tile_memory(s.d * kLanes), score_memory(rows * kLanes);
    Floats* tile = reinterpret_cast<Floats*>(tile_memory.data());
    Floats* scores = reinterpret_cast<Floats*>(score_memory.data());
    for (int64_t t = 0; t < count; t += kLanes) {
      for (int64_t i = 0; i < kLanes; ++i) {
        const uint8_t* levels = record_at(row) + (row % kRecord + t + i) * s.dim;
        for (int64_t c = 0; c < s.d; ++c)
          tile[c][i] = s.key_bits == 8 ? levels[c] : static_cast<float>(pair_in_16_bits(row + t + i)[c]);
      }
      score_tile<1>(scaled, tile, rows, s.d, scores);
      for (int64_t m = 0; m < rows; ++m) *reinterpret_cast<Floats*>(products + m * count + t) = scores[m];
    }
  }

  // Logits of one chunk of a head's low-bit tier, into s.logits; none of the sinks.
  void chunk_logits(int64_t head, int64_t start) const {
    const int64_t stop = std::min(low_bit(head), start + kChunk), first_place = place(head, start) - start;
    const int64_t step = s.group && s.group % kRecord == 0 ? kRecord : kRecord / 2;
    std::vector<float> scaled, base(rows), products(rows * step), scales(step, 1.0f);
    if (s.key_trellis) {
      const float* q = in_lanes.data() + head * rows * param_of_lane.size();
      scaled.assign(q, q + rows * param_of_lane.size());
      for (int64_t i = 0; i < rows * s.d; ++i) base[i / s.d] -= 1.5f * turned[head * rows * s.d + i];
    } else if (s.key_bits == 16) {
      scaled.assign(&turned[head * rows * s.d], &turned[head * rows * s.d] + rows * s.d);
    } else {
      scaled.resize(rows * std::max<int64_t>(s.d, param_of_lane.size()));
    }
    for (int64_t t = start; t < stop; t += step) {
      const int64_t row = first_place + t;
      if (s.key_bits < 16 && !s.key_trellis && t % s.group == 0) scale_query(head, row, scaled, base);
      if (s.key_bits < 8) score_fragments(scaled.data(), row, step, products.data());
      else score_tokens(scaled.data(), row, step, products.data());
      for (int64_t i = 0; s.key_trellis && i < step; ++i)
        scales[i] = Params{s.key_params, row, s.param_bits == 8}.scale(i);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t i = 0; i < step; i += kLanes) {
          Floats x = (load(&products[m * step + i]) + base[m]) * load(&scales[i]);
          if (s.share_tokens > 1) x += s.shares[((head * rows + m) * most + t) / s.share_tokens];
          else if (s.shares) x += load(s.shares + (head * rows + m) * most + t + i);
          x = capped(x);
          if (s.bias)
            for (int lane = 0; lane < kLanes; ++lane) x[lane] += bias(head, m, t + i + lane);
          *reinterpret_cast<Floats*>(logits_of(head) + m * s.capacity + t + i) = x;
        }
    }
    each_sink(head, start, std::max(start, stop), [&](int64_t, int64_t token) {
      for (int64_t m = 0; m < rows; ++m) logits_of(head)[m * s.capacity + token] = kNothing;
    });
  }

  // Weights [rows][kChunk] of one chunk of the low-bit tier from its logits, with part's peaks and totals. Tokens whose
  // pair is in the slots have none. Returns the records that count: without those whose logits are all below `cut`.
  std::vector<int> chunk_weights(int64_t head, int64_t start, const float* cut, float* weights, Part part) const {
    const int64_t count = std::min(low_bit(head) - start, kChunk);
    std::vector<int> kept;
    const int32_t* index = s.slot_index + head * s.top_k;
    for (int64_t m = 0; m < rows; ++m)
      std::copy_n(logits_of(head) + m * s.capacity + start, count, weights + m * kChunk);
    for (int64_t i = 0; i < s.top_k; ++i)
      if (index[i] >= start && index[i] < start + count)
        for (int64_t m = 0; m < rows; ++m) weights[m * kChunk + index[i] - start] = kNothing;
    for (int64_t t = 0; t < count; t += kRecord) {
      const int64_t size = std::min<int64_t>(kRecord, count - t);
      bool counts = !cut;
      for (int64_t m = 0; m < rows && !counts; ++m) counts = largest(weights + m * kChunk + t, size) >= cut[m];
      if (counts) kept.push_back(t / kRecord);
      for (int64_t m = 0; m < rows && !counts; ++m) std::fill_n(weights + m * kChunk + t, size, kNothing);
    }
    for (int64_t m = 0; m < rows; ++m) {
      float *weight = weights + m * kChunk, total = 0.0f;
      const float top = largest(weight, count), base = base_of(top);
      for (int64_t t = 0; t < count; ++t) weight[t] = weight_of(weight[t], base);
      for (int64_t t = 0; t < count; ++t) total += weight[t];
      std::fill(weight + count, weight + kChunk, 0.0f);
      part.peak[m] = top;
      part.total[m] = total;
    }
    return kept;
  }

  // Scales and zero points [count] of the values of tokens from `row` on, in group `v` of channels.
  void read_values(int64_t row, int64_t count, int64_t v, float* scales, float* zeros) const {
    const int64_t groups = s.value_trellis ? 1 : s.dim / s.channels;
    const Params params{s.value_params, s.value_trellis ? row : row * 2 * groups, s.param_bits == 8};
    for (int64_t t = 0; t < count; ++t) {
      // In the trellis code, the middle two of four scales are swapped.
      scales[t] = params.scale(s.value_trellis ? t / 4 * 4 + t % 2 * 2 + t / 2 % 2 : t * 2 * groups + v);
      zeros[t] = s.value_trellis ? -1.5f * scales[t] : params.zero((t * 2 + 1) * groups + v, scales[t]);
    }
  }

  // Add the values of records `kept` from `row` on, in fragments, to part.out; weights [rows][kChunk], for `count` tokens.
  void mix_fragments(int64_t row, int64_t count, const std::vector<int>& kept, const float* weights, Part part) const {
    const ValueOrder& v = value_order;
    const int64_t lanes = v.token.size(), records = kept.size(), channels = s.value_trellis ? s.dim : s.channels;
    std::vector<uint32_t> memory(records * v.words());
    std::vector<const uint32_t*> words(records);
    for (int64_t i = 0; i < records; ++i) {
      const uint8_t* values = record_at(row + kept[i] * kRecord) + kRecord * s.dim * s.key_bits / 8;
      words[i] = v.whole(reinterpret_cast<const uint32_t*>(values), memory.data() + i * v.words());
    }
    std::vector<float> scales(records * kRecord), zeros(records * kRecord), dealt(records * lanes * kRows);
    std::vector<float> sums(kRows * s.dim);
    for (int64_t first = 0; first < s.d; first += channels) {
      for (int64_t i = 0; i < records; ++i)
        read_values(row + kept[i] * kRecord, std::min<int64_t>(kRecord, count - kept[i] * kRecord), first / channels,
                    &scales[i * kRecord], &zeros[i * kRecord]);
      const int64_t stop = std::min(first + channels, s.d);
      for (int64_t m = 0; m < rows; m += kRows) {
        const int64_t block = std::min(kRows, rows - m);
        float zero[kRows] = {}, weighed[kRecord + 1] = {};  // the last one for lanes without a token
        for (int64_t r = 0; r < block; ++r)
          for (int64_t i = 0; i < records; ++i) {
            const float* weight = weights + (m + r) * kChunk + kept[i] * kRecord;
            float sum = 0.0f;
            for (int t = 0; t < kRecord; ++t) sum += weight[t] * zeros[i * kRecord + t];
            for (int t = 0; t < kRecord; ++t) weighed[t] = weight[t] * scales[i * kRecord + t];
            zero[r] += sum;
            float* to = &dealt[i * lanes * block + r * kLanes];
            for (int64_t lane = 0; lane < lanes; lane += kLanes, to += block * kLanes)
              for (int j = 0; j < kLanes; ++j) to[j] = weighed[v.token[lane + j]];
          }
        mix_rows_of(v, words.data(), records, dealt.data(), block, first / 8, (stop + 7) / 8, sums.data());
        for (int64_t r = 0; r < block; ++r)
          for (int64_t c = first; c < stop; ++c) part.out[(m + r) * s.d + c] = sums[r * s.dim + c] + zero[r];
      }
    }
  }

  // The same for tokens in rows, of 8 or 16 bits.
  void mix_tokens(int64_t row, int64_t count, const std::vector<int>& kept, const float* weights, Part part) const {
    const int64_t groups = s.value_bits == 8 ? s.dim / s.channels : 0;
    std::vector<float> values(kLanes * s.d), scales(kLanes * groups), zeros(kLanes * groups);
    for (const int record : kept)
      for (int64_t t = record * kRecord; t < std::min<int64_t>(count, (record + 1) * kRecord); t += kLanes) {
        for (int64_t v = 0; v < groups; ++v) read_values(row + t, kLanes, v, &scales[v * kLanes], &zeros[v * kLanes]);
        for (int64_t i = 0; i < kLanes; ++i) {
          const uint8_t* levels = record_at(row + t + i) + kRecord * s.dim * s.key_bits / 8 + (row + t + i) % kRecord * s.dim;
          for (int64_t c = 0; c < s.d; ++c) {
            const int64_t at = groups ? c / s.channels * kLanes + i : 0;
            values[i * s.d + c] = groups ? levels[c] * scales[at] + zeros[at]
                                         : static_cast<float>(pair_in_16_bits(row + t + i)[s.d + c]);
          }
        }
        mix_tile(weights + t, kChunk, values.data(), rows, s.d, part.out);
      }
  }

  // Attention over one chunk of the low-bit tier from its logits; cut as in `chunk_weights`.
  void chunk_mix(int64_t head, int64_t start, const float* cut, Part part) const {
    const int64_t count = std::min(low_bit(head) - start, kChunk);
    if (count <= 0) return;  // of a shorter row
    std::vector<float> weights(rows * kChunk);
    const std::vector<int> kept = chunk_weights(head, start, cut, weights.data(), part);
    if (s.value_bits < 8) mix_fragments(place(head, start), count, kept, weights.data(), part);
    else mix_tokens(place(head, start), count, kept, weights.data(), part);
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

  void denominators(const Parts& parts, int64_t head, float* peaks, float* shares) const {
    for (int64_t m = 0; m < rows; ++m) denominator(parts, head, m, peaks + m, shares + m);
  }

  // All parts of a head, merged, into s.out.
  void merge(Parts& parts, int64_t head) const {
    std::vector<float> sum(s.d);
    float *out = sum.data(), peak, share;
    for (int64_t m = 0; m < rows; ++m) {
      denominator(parts, head, m, &peak, &share);
      std::fill_n(out, s.d, 0.0f);
      for (int64_t i = 0; i <= chunks; ++i) {
        Part part = parts[head * (chunks + 1) + i];
        if (i == chunks && s.rotation) rotate(out, s.d, s.rotation);  // the sum of the low-bit tier's parts
        if (part.total[m] == 0.0f) continue;
        const float shrink = weight_of(part.peak[m], peak) * share;
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
