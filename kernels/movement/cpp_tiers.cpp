// The ops of `tier_ops.py` on a CPU: selection of pairs, refill of the slots, writes of new pairs. A pair is bytes here:
// 2·d elements, key first. A rounded host tier has the format of `stored_pairs.py`, converted from and to DTYPE.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Scores from 0 on sort like their bits; scores below 0 are no candidates.
inline int32_t order_of(float score) { return bits_of<int32_t>(score); }

// Buckets by exponent and the first bits of the mantissa: counting finds the lowest bucket with a selected score, and
// only scores in this bucket are compared.
constexpr int kShift = 20, kBuckets = 1 << (31 - kShift);

// Write the k tokens of largest score to selected[k], older tokens first among equal scores; -1 if none is left.
void choose(const float* scores, int64_t n, int64_t k, int32_t* selected) {
  std::vector<int32_t> counts(kBuckets);
  for (int64_t t = 0; t < n; ++t) {
    const int32_t order = order_of(scores[t]);
    if (order >= 0) ++counts[order >> kShift];
  }
  int64_t above = 0;
  int bucket = kBuckets - 1;
  for (; bucket > 0 && above + counts[bucket] < k; --bucket) above += counts[bucket];
  int64_t chosen = 0;
  std::vector<int32_t> rest;
  for (int64_t t = 0; t < n; ++t) {
    const int32_t order = order_of(scores[t]);
    if (order < 0 || order >> kShift < bucket) continue;
    if (order >> kShift > bucket) selected[chosen++] = t;
    else rest.push_back(t);
  }
  const int64_t left = std::min<int64_t>(k - chosen, rest.size());
  const auto before = [&](int32_t a, int32_t b) {
    const int32_t x = order_of(scores[a]), y = order_of(scores[b]);
    return x != y ? x > y : a < b;
  };
  if (left < static_cast<int64_t>(rest.size())) std::nth_element(rest.begin(), rest.begin() + left, rest.end(), before);
  std::copy_n(rest.begin(), left, selected + chosen);
  std::fill(selected + chosen + left, selected + k, -1);
}

// The columns of a cursor before a row's table, and the tokens of a page: `page_table.py`.
constexpr int64_t kTable = 3, kPage = 256;

// A tier in the pages of a cursor [rows, columns], or a ring of so many tokens per head. heads: of all rows; row_heads: of
// a row. pair: bytes of a pair; channels: d if it is rounded, else 0.
struct Tier {
  char* pairs;
  int64_t heads, pair, channels;
  const int64_t* cursor;
  int64_t columns, row_heads, ring = 0;
  // A head's part of a token's page.
  char* block(int64_t head, int64_t token) const {
    const int64_t page = cursor[head / row_heads * columns + kTable + token / kPage];
    return pairs + (page * row_heads + head % row_heads) * kPage * pair;
  }
  // A pair, without the scales of a rounded one.
  char* at(int64_t head, int64_t token) const {
    if (ring) return pairs + (head * ring + token % ring) * pair;
    return block(head, token) + token % kPage * (pair - scales());
  }
  char* scales_at(int64_t head, int64_t token) const {
    return block(head, token) + kPage * (pair - scales()) + token % kPage * scales();
  }
  int64_t scales() const { return channels ? 2 * sizeof(float) : 0; }
  // Bytes of a key, without its scale.
  int64_t half() const { return (pair - scales()) / 2; }
};

constexpr float kLargest = 127.0f;

// One key or value of d channels, rounded to codes and a scale, and back.
void round_to(const DTYPE* from, int64_t d, char* to, char* its_scale) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < d; ++i) {
    const float size = std::fabs(static_cast<float>(from[i]));
    finite &= size < INFINITY;
    largest = std::max(largest, size);
  }
  const float scale = finite ? largest / kLargest : NAN;
  for (int64_t i = 0; i < d; ++i) {
    to[i] = scale > 0.0f ? static_cast<int8_t>(std::nearbyint(static_cast<float>(from[i]) / scale)) : 0;
  }
  std::memcpy(its_scale, &scale, sizeof scale);
}

void widen(const char* from, const char* its_scale, int64_t d, DTYPE* to) {
  float scale;
  std::memcpy(&scale, its_scale, sizeof scale);
  for (int64_t i = 0; i < d; ++i) store(scale * static_cast<int8_t>(from[i]), to + i);
}

int64_t slot_bytes(const Tier& host) { return host.channels ? 2 * host.channels * sizeof(DTYPE) : host.pair; }

// Copy a pair of the host tier to a slot.
void bring(const Tier& host, int64_t head, int64_t token, char* slot) {
  const char* pair = host.at(head, token);
  const int64_t d = host.channels;
  if (!d) {
    std::memcpy(slot, pair, host.pair);
    return;
  }
  const char* scales = host.scales_at(head, token);
  DTYPE* to = reinterpret_cast<DTYPE*>(slot);
  widen(pair, scales, d, to);
  widen(pair + host.half(), scales + sizeof(float), d, to + d);
}

// Copy one head's selected pairs that its slots lack to its slots; returns their number.
int64_t refill_head(const int32_t* selected, const Tier& host, int64_t head, char* slots, int32_t* index, int64_t k) {
  const int64_t slot = slot_bytes(host);
  std::vector<int32_t> missing;
  std::vector<uint8_t> stays(k);
  for (int64_t i = 0; i < k; ++i) {
    if (selected[i] < 0) continue;
    int64_t place = -1;
    for (int64_t j = 0; j < k; ++j) place = index[j] == selected[i] ? j : place;
    if (place < 0) missing.push_back(selected[i]);
    else stays[place] = 1;
  }
  // There are never more missing pairs than free slots.
  size_t next = 0;
  for (int64_t j = 0; j < k; ++j) {
    if (stays[j]) continue;
    index[j] = -1;
    if (next == missing.size()) continue;
    index[j] = missing[next++];
    bring(host, head, index[j], slots + j * slot);
  }
  return missing.size();
}

}  // namespace

// scores [heads, stride], of which `n` a head count → selected [heads, k].
extern "C" void select_topk(const float* scores, int64_t heads, int64_t stride, int64_t n, int64_t k, int32_t* selected) {
  for (int64_t head = 0; head < heads; ++head) choose(scores + head * stride, n, k, selected + head * k);
}

// selected and slot_index [rows * heads, k], slots [rows * heads, k] of pairs, cursor [rows, columns], host a tier in
// pages; fetched: copied bytes are added to it.
extern "C" void refill(const int32_t* selected, const int64_t* cursor, char* host, char* slots, int32_t* slot_index,
                       int64_t columns, int64_t rows, int64_t heads, int64_t k, int64_t pair, int64_t channels,
                       int64_t* fetched) {
  const Tier tier = {host, rows * heads, pair, channels, cursor, columns, heads};
  for (int64_t head = 0; head < tier.heads; ++head) {
    char* own = slots + head * k * slot_bytes(tier);
    *fetched += pair * refill_head(selected + head * k, tier, head, own, slot_index + head * k, k);
  }
}

// Write the pairs of `count` new tokens to target from each row's length on; cursor [rows, columns]. keys and values
// [rows * heads, count] have `half` bytes each, and `width` bytes in the target: rounded if these have `channels`.
// ring: as in `Tier`.
extern "C" void write_pairs(const char* keys, const char* values, const int64_t* cursor, char* target, int64_t columns,
                            int64_t rows, int64_t heads, int64_t count, int64_t ring, int64_t half, int64_t width,
                            int64_t channels) {
  const Tier tier = {target, rows * heads, 2 * width, channels, cursor, columns, heads, ring};
  for (int64_t head = 0; head < tier.heads; ++head)
    for (int64_t t = 0; t < count; ++t) {
      const int64_t token = cursor[head / heads * columns] + t;
      if (token < 0) continue;  // no token (`cursor.py`)
      const char *key = keys + (head * count + t) * half, *value = values + (head * count + t) * half;
      char* to = tier.at(head, token);
      if (channels) {
        char* scales = tier.scales_at(head, token);
        round_to(reinterpret_cast<const DTYPE*>(key), channels, to, scales);
        round_to(reinterpret_cast<const DTYPE*>(value), channels, to + tier.half(), scales + sizeof(float));
      } else {
        std::memcpy(to, key, half);
        std::memcpy(to + tier.half(), value, half);
      }
    }
}
