// A decode step's attention over the low-bit tokens of one head, and the scores of candidates.
//
// Low-bit keys: q is multiplied by a group's scales once, and q·zero added once a group. Low-bit values: weights are
// multiplied by the tokens' scales. Rotated pairs stay rotated: the query is rotated before, the sum after.
// Bytes read per low-bit token: its codes and scales, once. FLOPs: 4·d per query row.

namespace {

struct Attention : ExactAttention {
  const KeyOrder& key_order;
  const ValueOrder& value_order;
  // Queries [B·H, rows, d] as keys are stored; [B·H, rows, dim] as params are stored; and as `score_words` requires.
  std::vector<float> turned, in_params_order;
  Aligned<float> in_lanes;

  explicit Attention(const StepArguments& step)
      : ExactAttention(step), key_order(order_of<KeyOrder>(s.dim, std::min<int64_t>(s.key_bits, 4), s.key_trellis)),
        value_order(order_of<ValueOrder>(s.dim, std::min<int64_t>(s.value_bits, 4), s.value_trellis)) {}

  // The codes of a token's record, by the token's number `row` among all heads'.
  const uint8_t* record_at(int64_t row) const {
    return static_cast<const uint8_t*>(s.codes) + row / kRecord * kRecord * s.row_width;
  }
  const T* pair_in_16_bits(int64_t row) const { return static_cast<const T*>(s.codes) + row * s.row_width; }
  // The levels of a token's key or value in rows of 8 bits.
  const uint8_t* levels_at(int64_t row, bool values) const {
    return record_at(row) + (values ? kRecord * s.dim * s.key_bits / 8 : 0) + row % kRecord * s.dim;
  }

  // Rotate the query, and bring it into the order of params and, for fragments, of lanes. The keys' half requires it.
  void arrange_query() {
    turned = query;
    in_params_order.resize(pairs * rows * s.dim);
    for (int64_t row = 0; row < pairs * rows; ++row) {
      float* q = turned.data() + row * s.d;
      if (s.rotation) rotate(q, s.d, s.rotation);
      for (int64_t c = 0; c < s.d; ++c)
        in_params_order[row * s.dim + (s.key_bits < 8 ? key_order.param_of(c) : c)] = q[c];
    }
    if (s.key_bits >= 8) return;
    in_lanes = Aligned<float>(pairs * rows * key_order.param.size());
    float* to = in_lanes.data();
    for (int64_t head = 0; head < pairs; ++head)
      for (int64_t first = 0; first < rows; first += kRows)  // as `score_words` reads them
        for (size_t i = 0; i < key_order.param.size(); i += kLanes)
          for (int64_t row = first; row < std::min(first + kRows, rows); ++row)
            for (size_t lane = i; lane < i + kLanes; ++lane)
              *to++ = in_params_order[(head * rows + row) * s.dim + key_order.param[lane]] * key_order.factor[lane];
  }

  // Multiply a head's query by the scales of the group of keys that begins at `row`, and by its zero points.
  void scale_query(int64_t head, int64_t row, float* scaled, std::vector<float>& base) const {
    std::vector<float> scales(s.dim), zeros(s.dim);
    const Params params{s.key_params, row / s.group * 2 * s.dim, s.param_bits == 8};
    for (int64_t c = 0; c < s.dim; ++c) scales[c] = params.scale(c);
    for (int64_t c = 0; c < s.dim; ++c) zeros[c] = params.zero(s.dim + c, scales[c]);
    const float* q = &in_params_order[head * rows * s.dim];
    for (int64_t m = 0; m < rows; ++m) base[m] = dot(q + m * s.dim, zeros.data(), s.dim);
    if (s.key_bits == 8) {
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t c = 0; c < s.d; ++c) scaled[m * s.d + c] = turned[(head * rows + m) * s.d + c] * scales[c];
      return;
    }
    const float* from = in_lanes.data() + head * rows * key_order.param.size();
    float* to = scaled;
    for (int64_t first = 0; first < rows; first += kRows)
      for (size_t i = 0; i < key_order.param.size(); i += kLanes) {
        Floats by;
        for (int lane = 0; lane < kLanes; ++lane) by[lane] = scales[key_order.param[i + lane]];
        for (int64_t row = first; row < std::min(first + kRows, rows); ++row, from += kLanes, to += kLanes)
          *reinterpret_cast<Floats*>(to) = load(from) * by;
      }
  }

  // Products [rows][count] of the scaled query with the levels of `count` tokens from `row` on, in fragments.
  void score_fragments(const float* scaled, int64_t row, int64_t count, float* products) const {
    const KeyOrder& k = key_order;
    Aligned<uint32_t> memory(k.words());
    Aligned<float> sums(kRows * kQuads * k.sums());
    const uint32_t* words = k.whole(reinterpret_cast<const uint32_t*>(record_at(row)), memory.data());
    const int first = row % kRecord / 8, stop = first + count / 8, shares = k.per_token;
    for (int64_t m = 0; m < rows; m += kRows) {
      const float* queries = scaled + m * key_order.param.size();
      with_rows(rows - m, [&](auto R) { score_words<R>(k, words, first, stop, queries, sums.data()); });
      for (int64_t r = m; r < std::min(m + kRows, rows); ++r) {
        const float* from = sums.data() + ((r - m) * kQuads + first) * k.sums();
        float* to = products + r * count;
        if (shares == 1) std::copy_n(from, count, to);  // gcc makes vectors of this form and of the next one
        else if (shares == 2)
          for (int64_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
        else
          for (int64_t i = 0; i < count; ++i) to[i] = std::accumulate(from + i * shares, from + (i + 1) * shares, 0.0f);
      }
    }
  }

  // The same for tokens in rows, of 8 or 16 bits.
  void score_tokens(const float* scaled, int64_t row, int64_t count, float* products) const {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t m = 0; m < rows; ++m)
        products[m * count + t] = s.key_bits == 8 ? dot(scaled + m * s.d, levels_at(row + t, false), s.d)
                                                  : dot(scaled + m * s.d, pair_in_16_bits(row + t), s.d);
  }

  // Logits of one chunk of a head's low-bit tier, into s.logits; none of the sinks.
  void chunk_logits(int64_t head, int64_t start) const {
    const int64_t stop = std::min(low_bit(head), start + kChunk), first_place = place(head, start) - start;
    const int64_t step = s.group && s.group % kRecord == 0 ? kRecord : kRecord / 2;
    Aligned<float> scaled(rows * std::max<int64_t>(s.d, key_order.param.size()));
    std::vector<float> base(rows), products(rows * step), scales(step, 1.0f);
    if (s.key_trellis) {
      std::copy_n(in_lanes.data() + head * rows * key_order.param.size(), rows * key_order.param.size(), scaled.data());
      for (int64_t i = 0; i < rows * s.d; ++i) base[i / s.d] -= 1.5f * turned[head * rows * s.d + i];
    } else if (s.key_bits == 16) {
      std::copy_n(&turned[head * rows * s.d], rows * s.d, scaled.data());
    }
    for (int64_t t = start; t < stop; t += step) {
      const int64_t row = first_place + t;
      if (s.key_bits < 16 && !s.key_trellis && t % s.group == 0) scale_query(head, row, scaled.data(), base);
      if (s.key_bits < 8) score_fragments(scaled.data(), row, step, products.data());
      else score_tokens(scaled.data(), row, step, products.data());
      for (int64_t i = 0; s.key_trellis && i < step; ++i)
        scales[i] = Params{s.key_params, row, s.param_bits == 8}.scale(i);
      for (int64_t m = 0; m < rows; ++m)
        for (int64_t i = 0; i < step; i += kLanes) {
          Floats x = (load(&products[m * step + i]) + base[m]) * load(&scales[i]);
          if (s.share_tokens > 1) x += s.shares[((head * rows + m) * most + t) / s.share_tokens];
          else if (s.shares) x += load(s.shares + (head * rows + m) * most + t + i);
          if (s.bias || s.softcap > 0)
            for (int lane = 0; lane < kLanes; ++lane) x[lane] = capped(x[lane]) + bias(head, m, t + i + lane);
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
      float* weight = weights + m * kChunk;
      softmax(weight, count, part.peak + m, part.total + m);
      std::fill(weight + count, weight + kChunk, 0.0f);
    }
    return kept;
  }

  // Scales and zero points [count] of the values of tokens from `row` on, in group `v` of channels.
  void read_values(int64_t row, int64_t count, int64_t v, float* scales, float* zeros) const {
    const int64_t groups = s.value_trellis ? 1 : s.dim / s.channels;
    const Params params{s.value_params, s.value_trellis ? row : row * 2 * groups, s.param_bits == 8};
    for (int64_t t = 0; t < count && !s.value_trellis; ++t) {
      scales[t] = params.scale(t * 2 * groups + v);
      zeros[t] = params.zero((t * 2 + 1) * groups + v, scales[t]);
    }
    if (!s.value_trellis) return;
    for (int64_t t = 0; t < count; ++t) scales[t] = params.scale(t);
    for (int64_t t = 0; t < count; t += 4) std::swap(scales[t + 1], scales[t + 2]);  // `records.in_thread_order`
    for (int64_t t = 0; t < count; ++t) zeros[t] = -1.5f * scales[t];
  }

  // Add the values of records `kept` from `row` on, in fragments, to part.out; weights [rows][kChunk], for `count` tokens.
  void mix_fragments(int64_t row, int64_t count, const std::vector<int>& kept, const float* weights, Part part) const {
    const ValueOrder& v = value_order;
    const int64_t lanes = v.token.size(), records = kept.size(), channels = s.value_trellis ? s.dim : s.channels;
    Aligned<uint32_t> memory(records * v.words());
    std::vector<const uint32_t*> words(records);
    for (int64_t i = 0; i < records; ++i) {
      const uint8_t* values = record_at(row + kept[i] * kRecord) + kRecord * s.dim * s.key_bits / 8;
      words[i] = v.whole(reinterpret_cast<const uint32_t*>(values), memory.data() + i * v.words());
    }
    std::vector<float> scales(records * kRecord), zeros(records * kRecord), sums(kRows * s.dim);
    Aligned<float> dealt(records * lanes * kRows);
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
            v.deal(weighed, block * kLanes, dealt.data() + i * lanes * block + r * kLanes);
          }
        with_rows(block, [&](auto R) {
          mix_words<R>(v, words.data(), records, dealt.data(), first / 8, (stop + 7) / 8, sums.data());
        });
        for (int64_t r = 0; r < block; ++r)
          for (int64_t c = first; c < stop; ++c) part.out[(m + r) * s.d + c] = sums[r * s.dim + c] + zero[r];
      }
    }
  }

  // The same for tokens in rows, of 8 or 16 bits.
  void mix_tokens(int64_t row, int64_t count, const std::vector<int>& kept, const float* weights, Part part) const {
    const int64_t groups = s.value_bits == 8 ? s.dim / s.channels : 0;
    std::vector<float> value(s.d);
    for (const int record : kept)
      for (int64_t t = record * kRecord; t < std::min<int64_t>(count, (record + 1) * kRecord); ++t) {
        if (s.value_bits == 16) {
          add_weighted(weights + t, kChunk, pair_in_16_bits(row + t) + s.d, rows, s.d, part.out);
          continue;
        }
        const uint8_t* levels = levels_at(row + t, true);
        const Params params{s.value_params, (row + t) * 2 * groups, s.param_bits == 8};
        for (int64_t v = 0; v * s.channels < s.d; ++v) {
          const float scale = params.scale(v), zero = params.zero(groups + v, scale);
          for (int64_t c = v * s.channels; c < std::min((v + 1) * s.channels, s.d); ++c)
            value[c] = levels[c] * scale + zero;
        }
        add_weighted(weights + t, kChunk, value.data(), rows, s.d, part.out);
      }
  }

  // Attention over one chunk of the low-bit tier from its logits; cut as in `chunk_weights`.
  void chunk_mix(int64_t head, int64_t start, const float* cut, Part part) const {
    const int64_t count = std::min(low_bit(head) - start, kChunk);
    std::vector<float> weights(rows * kChunk);
    const std::vector<int> kept = chunk_weights(head, start, cut, weights.data(), part);
    if (s.value_bits < 8) mix_fragments(place(head, start), count, kept, weights.data(), part);
    else mix_tokens(place(head, start), count, kept, weights.data(), part);
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
};

}  // namespace
