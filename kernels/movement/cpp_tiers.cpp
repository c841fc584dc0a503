// The ops of `tier_ops.py` on a CPU: selection of pairs, refill of the slots, writes of new pairs. A pair is bytes here:
// 2·d elements, key first. A rounded host tier has the format of `stored_pairs.py`.

#include <cmath>

namespace {

// Scores from 0 on sort like their bits; scores below 0 are no candidates. Buckets by exponent and the first bits of the
// mantissa: counting finds the lowest bucket with a selected score, and only scores in this bucket are compared.
constexpr int kShift = 20, kBuckets = 1 << (31 - kShift);

// Write the k tokens of largest score to selected[k], older tokens first among equal scores; -1 if none is left.
void choose(const float* scores, int64_t n, int64_t k, int32_t* selected) {
  std::vector<int32_t> counts(kBuckets);
  for (int64_t t = 0; t < n; ++t) {
    const int32_t order = bits_of<int32_t>(scores[t]);
    if (order >= 0) ++counts[order >> kShift];
  }
  int64_t above = 0;
  int bucket = kBuckets - 1;
  for (; bucket > 0 && above + counts[bucket] < k; --bucket) above += counts[bucket];
  int64_t chosen = 0;
  std::vector<int32_t> rest;
  for (int64_t t = 0; t < n; ++t) {
    const int32_t order = bits_of<int32_t>(scores[t]);
    if (order < 0 || order >> kShift < bucket) continue;
    if (order >> kShift > bucket) selected[chosen++] = t;
    else rest.push_back(t);
  }
  const int64_t left = std::min<int64_t>(k - chosen, rest.size());
  const auto before = [&](int32_t a, int32_t b) {
    const int32_t x = bits_of<int32_t>(scores[a]), y = bits_of<int32_t>(scores[b]);
    return x != y ? x > y : a < b;
  };
  if (left < static_cast<int64_t>(rest.size())) std::nth_element(rest.begin(), rest.begin() + left, rest.end(), before);
  std::copy_n(rest.begin(), left, selected + chosen);
  std::fill(selected + chosen + left, selected + k, -1);
}

// A cursor's number of low-bit tokens, and its columns before a row's table; the tokens of a page: `page_table.py`.
constexpr int64_t kLowBit = 1, kTable = 3, kPage = 256;

// A tier in the pages of a cursor [rows, columns], or a ring of so many tokens per head. heads: of all rows; row_heads: of
// a row. pair, exact: bytes of a pair, here and in the model's dtype. dtype: that dtype's number (`library.DTYPES`) if
// pairs are rounded here, else -1.
struct Tier {
  char* pairs;
  int64_t heads, pair, exact, dtype;
  const int64_t* cursor;
  int64_t columns, row_heads, ring = 0;
  // A head's part of a token's page.
  char* block(int64_t head, int64_t token) const {
    const int64_t page = cursor[head / row_heads * columns + kTable + token / kPage];
    return pairs + (page * row_heads + head % row_heads) * kPage * pair;
  }
  // A key (0) or value (1), without the scale of a rounded one.
  char* at(int64_t head, int64_t token, int64_t which) const {
    if (ring) return pairs + (head * ring + token % ring) * pair + which * pair / 2;
    return block(head, token) + token % kPage * (pair - scales()) + which * (pair - scales()) / 2;
  }
  char* scale_at(int64_t head, int64_t token, int64_t which) const {
    return block(head, token) + kPage * (pair - scales()) + token % kPage * scales() + which * sizeof(float);
  }
  int64_t scales() const { return dtype < 0 ? 0 : 2 * sizeof(float); }
};

constexpr float kLargest = 127.0f;
// New tokens above which a second thread saves more than it costs.
constexpr int64_t kManyTokens = 64;

// Round a key or value of d channels to codes and a scale.
template <typename T>
void round_to(const T* from, int64_t d, char* to, char* its_scale) {
  const int32_t largest = largest_bits(from, d);
  const float scale = largest < bits_of<int32_t>(INFINITY) ? bits_of<float>(largest) / kLargest : NAN;
  for (int64_t i = 0; i < d; ++i)
    to[i] = scale > 0.0f ? static_cast<int32_t>(std::nearbyint(static_cast<float>(from[i]) / scale)) : 0;
  std::memcpy(its_scale, &scale, sizeof scale);
}

template <typename T>
void widen(const char* from, const char* its_scale, int64_t d, T* to) {
  float scale;
  std::memcpy(&scale, its_scale, sizeof scale);
  for (int64_t i = 0; i < d; ++i) to[i] = scale * static_cast<int8_t>(from[i]);
}

// Call what(0), with the 0 of the dtype at this index of `DTYPES` (`library.py`).
template <typename Do>
void with_dtype(int64_t dtype, Do&& what) {
  if (dtype == 0) what(float{});
  else if (dtype == 1) what(c10::BFloat16{});
  else what(c10::Half{});
}

// Copy a key or value of the model to the tier.
void keep(const Tier& tier, int64_t head, int64_t token, int64_t which, const char* from) {
  char* to = tier.at(head, token, which);
  if (tier.dtype < 0) std::memcpy(to, from, tier.exact / 2);
  else with_dtype(tier.dtype, [&](auto number) {
    const auto* numbers = reinterpret_cast<const decltype(number)*>(from);
    round_to(numbers, tier.exact / 2 / sizeof number, to, tier.scale_at(head, token, which));
  });
}

// Copy a pair of the host tier to a slot.
void bring(const Tier& host, int64_t head, int64_t token, char* slot) {
  if (host.dtype < 0) std::memcpy(slot, host.at(head, token, 0), host.pair);
  else with_dtype(host.dtype, [&](auto number) {
    const int64_t d = host.exact / 2 / sizeof number;
    auto* to = reinterpret_cast<decltype(number)*>(slot);
    for (int64_t which = 0; which < 2; ++which)
      widen(host.at(head, token, which), host.scale_at(head, token, which), d, to + which * d);
  });
}

}  // namespace

// scores [heads, capacity] → selected [heads, k]. heads: of all rows; row_heads: of a row. With a cursor [rows, columns]
// only tokens that are in the row's low-bit tier before the step are candidates; null: all tokens are.
extern "C" void select_topk(const float* scores, int64_t heads, int64_t capacity, int64_t k, const int64_t* cursor,
                            int64_t columns, int64_t row_heads, int32_t* selected) {
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t n = cursor ? cursor[head / row_heads * columns + kLowBit] : capacity;
    choose(scores + head * capacity, n, k, selected + head * k);
  }
}

// Copy the selected pairs that the slots lack to the slots. selected and slot_index [rows * heads, k], slots [rows *
// heads, k] of pairs, cursor [rows, columns], host a `Tier` in pages; fetched: copied bytes are added to it.
extern "C" void refill(const int32_t* selected, const int64_t* cursor, char* host, char* slots, int32_t* slot_index,
                       int64_t columns, int64_t rows, int64_t heads, int64_t k, int64_t pair, int64_t exact,
                       int64_t dtype, int64_t* fetched) {
  const Tier tier = {host, rows * heads, pair, exact, dtype, cursor, columns, heads};
  for (int64_t head = 0; head < tier.heads; ++head, selected += k, slot_index += k, slots += k * exact) {
    std::vector<int32_t> missing;
    std::vector<uint8_t> stays(k);
    for (int64_t i = 0; i < k; ++i) {
      if (selected[i] < 0) continue;
      int64_t place = -1;
      for (int64_t j = 0; j < k; ++j) place = slot_index[j] == selected[i] ? j : place;
      if (place < 0) missing.push_back(selected[i]);
      else stays[place] = 1;
    }
    *fetched += pair * missing.size();
    // There are never more missing pairs than free slots.
    size_t next = 0;
    for (int64_t j = 0; j < k; ++j) {
      if (stays[j]) continue;
      slot_index[j] = -1;
      if (next == missing.size()) continue;
      slot_index[j] = missing[next++];
      bring(tier, head, slot_index[j], slots + j * exact);
    }
  }
}

// Write the pairs of `count` new tokens, keys and values [rows * heads, count], to the `Tier` target from each row's
// length on; cursor [rows, columns].
extern "C" void write_pairs(const char* keys, const char* values, const int64_t* cursor, char* target, int64_t columns,
                            int64_t rows, int64_t heads, int64_t count, int64_t ring, int64_t pair, int64_t exact,
                            int64_t dtype) {
  const Tier tier = {target, rows * heads, pair, exact, dtype, cursor, columns, heads, ring};
#pragma omp parallel for num_threads(threads()) if (count > kManyTokens)
  for (int64_t head = 0; head < tier.heads; ++head)
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = cursor[head / heads * columns] + t, from = (head * count + t) * exact / 2;
      if (token < 0) continue;  // no token (`cursor.py`)
      keep(tier, head, token, 0, keys + from);
      keep(tier, head, token, 1, values + from);
    }
}
