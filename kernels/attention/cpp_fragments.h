// Products of records in fragment order (`records.py`) with queries and with weights.
//
// A vector holds words of neighbouring threads. Lane and field determine a number's token and channel, so the query and
// the weights are brought into the codes' order. A field then takes a mask, a conversion, and a multiply-add for each
// row. Fields are not shifted: the query, or the sum of values, has the factor that the place of the field requires.
// Sums across lanes follow once for a record of keys, and once for a chunk of values.

#include <map>
#include <numeric>
#include <tuple>
#include <type_traits>

namespace {

// Query rows whose sums are in registers at once.
constexpr int64_t kRows = kLanes == 16 ? 8 : 4;

// Call what(R) with an integral constant, R of `rows` query rows.
template <int R = kRows, typename Do>
inline void with_rows(int64_t rows, Do&& what) {
  if constexpr (R > 1)
    if (rows < R) return with_rows<R - 1>(rows, what);
  what(std::integral_constant<int, R>{});
}

// The four sums of lanes i, i + 4, ...
inline void add_fours(Floats x, float* to) {
  typedef float Four __attribute__((vector_size(16), aligned(4)));
  float lanes[kLanes];
  *reinterpret_cast<Floats*>(lanes) = x;
  Four sum = *reinterpret_cast<Four*>(lanes);
  for (int i = 4; i < kLanes; i += 4) sum += *reinterpret_cast<Four*>(lanes + i);
  *reinterpret_cast<Four*>(to) = sum;
}

// Keys. A word holds numbers of one of `per_token` words of a token, or of `tokens` tokens.
struct KeyOrder : Order {
  const int tokens, per_token, run, variants, entries;
  // Of a query's lanes [variants][entries][kLanes]: the parameter's index, and the factor that cancels the field's bit
  // offset. entries: [plane][vector][field][half].
  std::vector<uint16_t> param;
  std::vector<float> factor;

  KeyOrder(int dim, int stored, bool trellis)
      : Order(dim, stored, trellis), tokens(std::max(1, fields * 8 / dim)),
        per_token(std::max(1, dim / 8 / fields)), run(fields / tokens / planes),
        variants(std::max(1, per_token / loads)), entries(planes * vectors * run * 2) {
    for (int at = 0; at < variants * entries * kLanes; ++at) {
      const int lane = at % kLanes, entry = at / kLanes % entries, half = entry % 2, field = entry / 2 % run;
      const int vector = entry / 2 / run % vectors, plane = entry / 2 / run / vectors;
      const int q = thread(vector, lane), number = (at / kLanes / entries * loads + word(lane)) * fields;
      param.push_back(q < 4 ? param_of((number + planes * field + plane) % (dim / 8) * 8 + 2 * q + half) : 0);
      factor.push_back(1.0f / (1 << field * bits));
    }
  }

  // The place of a channel's scale and zero point (`records.py`).
  int param_of(int c) const {
    const int block = std::min(dim, 64), i = c % block;
    return c - i + i % 8 / 2 * (block / 4) + i / 16 * 4 + i % 2 * 2 + i / 8 % 2;
  }

  // Partial sums of each g: `per_token` for each token.
  int sums() const { return 8 * per_token; }

  void fold(Floats x, float* to) const {
    for (int word = 0; word < loads; ++word) {
      float sum = 0.0f;
      for (int lane = word; lane < std::min(kLanes, 4 * loads); lane += loads) sum += x[lane];
      to[word * tokens] = sum;
    }
  }
};

// sums [R][8][k.sums()] of the threads with first <= g < stop; query [variants][entries][R][kLanes].
template <int R>
__attribute__((noinline)) void score_words(const KeyOrder& k, const uint32_t* words, int first, int stop,
                                           const float* query, float* sums) {
  // Values of g at once: enough sums to hide a multiply-add's latency, as registers allow.
  constexpr int U = R <= (kLanes == 16 ? 4 : 2) ? 4 : 2;
  const bool fours = k.loads == 4 && k.tokens == 1;
  for (int l = 0; l < k.blocks / kQuads; ++l)
    for (int g = first; g < stop; g += U)
      for (int token = 0; token < k.tokens; ++token) {
        Floats sum[U][R] = {};
        const float* at = query + l % k.variants * k.entries * R * kLanes;
        for (int vector = 0; vector < k.planes * k.vectors; ++vector) {
          Words low[U], high[U], mask = Words{} + ((1u << k.bits) - 1);
          for (int u = 0; u < U; ++u) {
            low[u] = load_words(words + (l * kQuads + g + u) * k.pitch + vector * kLanes) >> (token * k.run * k.bits);
            high[u] = low[u] >> 16;
          }
          for (int field = 0; field < k.run; ++field, mask <<= k.bits, at += 2 * R * kLanes) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
              Floats x[U];
              for (int u = 0; u < U; ++u) x[u] = masked(half ? high[u] : low[u], mask);
#pragma GCC unroll 8
              for (int r = 0; r < R; ++r) {
                const Floats q = held(load(at + (half * R + r) * kLanes));
#pragma GCC unroll 4
                for (int u = 0; u < U; ++u) sum[u][r] = fma(x[u], q, sum[u][r]);
              }
            }
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
          for (int u = 0; u < U; ++u) {
            float* to = sums + (r * kQuads + g + u) * k.sums() + l * k.loads * k.tokens + token;
            if (fours) add_fours(sum[u][r], to);
            else k.fold(sum[u][r], to);
          }
      }
}

// Values. `shares`: numbers of a channel in a field's place, for tokens 8 apart and of other words of a load.
struct ValueOrder : Order {
  const int shares;
  struct Field {
    int offset, shift;  // of the word relative to the block of g, and of the share in the word
  };
  std::vector<Field> fields_of;  // of a channel 8·c + g: [c][shares]
  std::vector<int> first_bit;    // [c], of the first share
  std::vector<uint8_t> token;  // of a row's weights in a record [shares][vectors][half][kLanes]; kRecord: none

  ValueOrder(int dim, int stored, bool trellis) : Order(dim, stored, trellis), shares(2 * 4 / loads) {
    for (int c = 0; c < dim / 8 + 3; ++c) {  // three more, since channels are summed in fours
      const int plane = c % planes, width = bits / planes;
      first_bit.push_back((c % fields - plane) * width);
      for (int share = 0; share < shares; ++share) {
        const int number = std::min(c, dim / 8 - 1) + dim / 8 * share;
        const int offset = number / fields * kQuads * pitch + plane * vectors * kLanes;
        fields_of.push_back({offset, dim / 8 * share % fields * width});
      }
    }
    for (int at = 0; at < shares * vectors * 2 * kLanes; ++at) {
      const int lane = at % kLanes, half = at / kLanes % 2, vector = at / kLanes / 2 % vectors;
      const int share = at / kLanes / 2 / vectors, q = thread(vector, lane);
      const int pair = word(lane) * (shares / 2) + share / 2;
      token.push_back(q < 4 ? 16 * q + share % 2 * 8 + 2 * pair + half : kRecord);
    }
  }

  // Bring a row's weights [64] and a zero into the order of lanes, vectors `stride` apart.
  void deal(const float* weights, int64_t stride, float* to) const {
    for (size_t i = 0; i < token.size(); i += kLanes, to += stride)
      for (int lane = 0; lane < kLanes; ++lane) to[lane] = weights[token[i + lane]];
  }
};

// The lane order of a record format, cached: deriving it in each step costs too much.
template <typename Kind>
const Kind& order_of(int dim, int stored, bool trellis) {
  static thread_local std::map<std::tuple<int, int, bool>, Kind> made;
  return made.try_emplace({dim, stored, trellis}, dim, stored, trellis).first->second;
}

// out[r][8·c + g] = Σ_t weights[r][t]·level[t][8·c + g] for first <= c < stop, over `count` records.
template <int R>
__attribute__((noinline)) void mix_words(const ValueOrder& v, const uint32_t* const* records, int count,
                                         const float* weights, int first, int stop, float* out) {
  constexpr int C = R <= 2 ? 4 : 2;  // channels at once
  for (int g = 0; g < kQuads; ++g)
    for (int c = first; c < stop; c += C) {
      Floats sum[C][R] = {};
      Words mask[C];
      for (int i = 0; i < C; ++i) mask[i] = Words{} + (((1u << v.bits) - 1) << v.first_bit[c + i]);
      const float* at = weights;
      for (int record = 0; record < count; ++record)
        for (int share = 0; share < v.shares; ++share)
          for (int vector = 0; vector < v.vectors; ++vector) {
            Words word[C];
            for (int i = 0; i < C; ++i) {
              const ValueOrder::Field field = v.fields_of[(c + i) * v.shares + share];
              word[i] = load_words(records[record] + g * v.pitch + field.offset + vector * kLanes);
              if (field.shift) word[i] >>= field.shift;
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half, at += R * kLanes) {
              Floats x[C];
              for (int i = 0; i < C; ++i) x[i] = masked(half ? word[i] >> 16 : word[i], mask[i]);
#pragma GCC unroll 8
              for (int r = 0; r < R; ++r) {
                const Floats w = held(load(at + r * kLanes));
#pragma GCC unroll 4
                for (int i = 0; i < C; ++i) sum[i][r] = fma(x[i], w, sum[i][r]);
              }
            }
          }
      for (int i = 0; i < C && c + i < stop; ++i)
        for (int r = 0; r < R; ++r) {
          float four[4];
          add_fours(sum[i][r], four);
          out[r * v.dim + 8 * (c + i) + g] = (four[0] + four[1] + four[2] + four[3]) / (1 << v.first_bit[c + i]);
        }
    }
}

}  // namespace
