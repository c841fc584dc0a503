// A decode step's lengths, its attention over some 16-bit pairs of a head, and the merge of a head's parts.
// cpp/library.py declares `StepArguments` and its shapes.

#include <vector>

namespace {

// An additive mask hides a token with its dtype's minimum; float16's is the closest to 0 (`query.SEEN`).
constexpr float kSeen = -65504.0f / 2;
// Low-bit tokens per job; a multiple of every group size, and those of a page (`page_table.py`).
constexpr int64_t kChunk = 256;
// The columns of a cursor before a row's table (`cursor.py`).
constexpr int64_t kTable = 3;
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
struct ExactAttention {
  const StepArguments& s;
  const int64_t rows, pairs, most, chunks;  // most: tokens of the fullest low-bit tier
  std::vector<float> query;                   // [B·H, rows, d], scaled

  explicit ExactAttention(const StepArguments& step)
      : s(step), rows(s.group_heads * s.lanes), pairs(s.batch * s.heads), most(fullest(s)),
        chunks((most + kChunk - 1) / kChunk), query(pairs * rows * s.d) {
    for (size_t i = 0; i < query.size(); ++i) query[i] = static_cast<const T*>(s.q)[i] * s.scale;
  }

  // Lengths of each batch row, indexed by head; negative lengths (`cursor.py`) count as 0.
  const int64_t* cursor(int64_t head) const { return s.cursor + head / s.heads * (kTable + s.pages); }
  int64_t length(int64_t head) const { return std::max<int64_t>(cursor(head)[0], 0); }
  int64_t low_bit(int64_t head) const { return cursor(head)[1]; }
  int64_t candidates(int64_t head) const { return std::min(cursor(head)[2], length(head)); }
  static int64_t fullest(const StepArguments& s) {
    int64_t found = 0;
    for (int64_t row = 0; row < s.batch; ++row) found = std::max(found, s.cursor[row * (kTable + s.pages) + 1]);
    return found;
  }
  // Index of a head's token in the low-bit tier, among all heads' tokens; the tokens of one chunk are contiguous.
  int64_t place(int64_t head, int64_t token) const {
    return (cursor(head)[kTable + token / kChunk] * s.heads + head % s.heads) * kChunk + token % kChunk;
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

  float capped(float x) const { return s.softcap > 0 ? std::tanh(x / s.softcap) * s.softcap : x; }

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
      found.push_back({k + at, v + at, length(head), l});
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

  // Logits [rows][count] of a head's query rows and some pairs in 16 bits.
  std::vector<float> exact_logits(int64_t head, const std::vector<Pair>& of) const {
    const int64_t count = of.size();
    std::vector<float> logits(rows * count, kNothing);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t m = 0; m < rows; ++m)
        if (m % s.lanes >= of[t].first_lane)
          logits[m * count + t] =
              capped(dot(&query[(head * rows + m) * s.d], of[t].key, s.d)) + bias(head, m, of[t].token);
    return logits;
  }

  // Attention over 16-bit pairs; returns their logits.
  std::vector<float> exact_mix(int64_t head, const std::vector<Pair>& of, Part part) const {
    const std::vector<float> logits = exact_logits(head, of);
    const int64_t count = of.size();
    std::vector<float> weights(logits);
    for (int64_t m = 0; m < rows; ++m) softmax(&weights[m * count], count, part.peak + m, part.total + m);
    for (int64_t t = 0; t < count; ++t) add_weighted(&weights[t], count, of[t].value, rows, s.d, part.out);
    return logits;
  }

  // Peaks and totals of the first `count` logits of each row, which are `stride` apart.
  void totals(const float* logits, int64_t stride, int64_t count, Part part) const {
    for (int64_t m = 0; m < rows; ++m) {
      const float *row = logits + m * stride, peak = largest(row, count), base = base_of(peak);
      float total = 0.0f;
      for (int64_t t = 0; t < count; ++t) total += weight_of(row[t], base);
      part.peak[m] = peak;
      part.total[m] = total;
    }
  }

  // Each row's maximum, and 1/Σ exp, over all its head's parts and its sink; a fully masked row gives 0.
  void denominators(const Parts& parts, int64_t head, float* peaks, float* shares) const {
    const int64_t first = head * (chunks + 1);
    for (int64_t m = 0; m < rows; ++m) {
      const float sink = s.sinks ? s.sinks[head % s.heads * s.group_heads + m / s.lanes] : kNothing;
      float top = sink, total = 0.0f;
      for (int64_t i = 0; i <= chunks; ++i) top = std::max(top, parts.peaks[(first + i) * rows + m]);
      const float base = base_of(top);
      for (int64_t i = 0; i <= chunks; ++i)
        total += parts.totals[(first + i) * rows + m] * weight_of(parts.peaks[(first + i) * rows + m], base);
      total += weight_of(sink, base);
      peaks[m] = base;
      shares[m] = total == 0.0f ? 0.0f : 1.0f / total;
    }
  }

  // All parts of a head, merged, into s.out.
  void merge(Parts& parts, int64_t head) const {
    std::vector<float> sum(s.d), peaks(rows), shares(rows);
    denominators(parts, head, peaks.data(), shares.data());
    float* out = sum.data();
    for (int64_t m = 0; m < rows; ++m) {
      std::fill_n(out, s.d, 0.0f);
      for (int64_t i = 0; i <= chunks; ++i) {
        Part part = parts[head * (chunks + 1) + i];
        if (i == chunks && s.rotation) rotate(out, s.d, s.rotation);  // the sum of the low-bit tier's parts
        if (part.total[m] == 0.0f) continue;
        const float shrink = weight_of(part.peak[m], peaks[m]) * shares[m];
        for (int64_t c = 0; c < s.d; ++c) out[c] += part.out[m * s.d + c] * shrink;
      }
      for (int64_t c = 0; c < s.d; ++c) static_cast<T*>(s.out)[(head * rows + m) * s.d + c] = out[c];
    }
  }
};

}  // namespace
