// Attention of a few query rows to rows of bfloat16 that are keys and values at once, as a latent cache's are, by a
// processor that multiplies tiles of them (AMX). Each row is read from memory once: a block of rows stays in a core's
// cache between the two products, and the next block is asked for meanwhile.

#include <algorithm>
#include <cmath>
#include <vector>
#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

typedef BFloat16 T;

constexpr int64_t kBlock = 128;             // tokens
constexpr int64_t kPair = 2 * kLanes;       // numbers of a tile's row
constexpr int64_t kTile = kLanes * kLanes;  // words, or floats, of a tile
constexpr int64_t kSteps = kBlock / kPair;  // tiles of a block's weights

// To bfloat16, which is the upper half of each word.
inline Words rounded(Floats x) {
  const Words bits = bits_of<Words>(x);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

inline Words words(const void* from) {
  Words to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

inline void put(void* to, Words from) { std::memcpy(to, &from, sizeof from); }

// A square of words, its rows for its columns: each round deals two halves out like a pack of cards.
inline void transpose_words(Words* square) {
  const Words low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
  for (int round = 0; round < 4; ++round) {
    Words rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = square[i];
    for (int i = 0; i < kLanes / 2; ++i) {
      const __m512i a = bits_of<__m512i>(rows[i]), b = bits_of<__m512i>(rows[i + kLanes / 2]);
      square[2 * i] = bits_of<Words>(_mm512_permutex2var_epi32(a, bits_of<__m512i>(low), b));
      square[2 * i + 1] = bits_of<Words>(_mm512_permutex2var_epi32(a, bits_of<__m512i>(high), b));
    }
  }
}

// What some tokens come to for each query row, padded to whole tiles of rows: the largest logit, the weights' sum, and
// what they mix, as tiles of the even and of the odd ones of 32 channels in turn.
//
// A right factor's tile has pairs: its word [i][n] is the numbers 2i and 2i + 1 of column n.
class Part {
 public:
  Part(int64_t rows, int64_t width)
      : rows(rows), width(width), lanes((rows + kLanes - 1) / kLanes * kLanes), peak(lanes, kNothing), total(lanes),
        mixed(lanes * width), query(lanes * width / 2), logits(kBlock * lanes), weights(kBlock * lanes / 2) {}

  void attend(const T* q, const T* tokens, int64_t count, float scale);
  // to[width] += share times what a row has mixed.
  void add(int64_t row, float share, float* to) const;

  const int64_t rows, width, lanes;
  std::vector<float> peak, total, mixed;

 private:
  std::vector<uint32_t> query;    // right factors, by 32 channels and by sixteen rows
  std::vector<float> logits;      // [kBlock][lanes], then weights
  std::vector<uint32_t> weights;  // left factors, by sixteen rows and by 32 tokens

  void pack(const T* q);
  void score(const T* block);
  void weigh(int64_t there, float scale, bool first);
  void mix(const T* block, const T* next);
};

void Part::pack(const T* q) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < width; c += 2) {
      const int64_t tile = c / kPair * (lanes / kLanes) + r / kLanes;
      std::memcpy(&query[tile * kTile + c % kPair / 2 * kLanes + r % kLanes], q + r * width + c, sizeof(uint32_t));
    }
}

// The header tells gcc of no memory that loads of tiles read: what was stored before is to be there.
inline void all_is_stored() { asm volatile("" ::: "memory"); }

// logits[t][row] = Σ_c q[row][c]·block[t][c].
void Part::score(const T* block) {
  all_is_stored();
  for (int64_t t = 0; t < kBlock; t += 2 * kLanes)
    for (int64_t m = 0; m < lanes / kLanes; ++m) {
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t c = 0; c < width; c += kPair) {
        const T* keys = block + t * width + c;
        _tile_loadd(2, keys, 2 * width);
        _tile_loadd(3, keys + kLanes * width, 2 * width);
        _tile_loadd(4, &query[(c / kPair * (lanes / kLanes) + m) * kTile], 64);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, &logits[t * lanes + m * kLanes], 4 * lanes);
      _tile_stored(1, &logits[(t + kLanes) * lanes + m * kLanes], 4 * lanes);
    }
}

// The logits of the block's first `there` tokens become weights relative to the largest so far, by which what was mixed
// before is scaled; the other tokens' are 0.
void Part::weigh(int64_t there, float scale, bool first) {
  for (int64_t lane = 0; lane < lanes; lane += kLanes) {
    Floats top = load(&peak[lane]), sum = load(&total[lane]);
    const Floats before = top;
    for (int64_t t = 0; t < there; ++t) {
      const Floats x = load(&logits[t * lanes + lane]) * scale;
      top = x > top ? x : top;
    }
    Floats base;
    bool moved = false;
    for (int i = 0; i < kLanes; ++i) {
      base[i] = base_of(top[i]);
      moved |= top[i] > before[i];
    }
    if (moved && !first) {
      Floats factors;
      for (int i = 0; i < kLanes; ++i) factors[i] = weight_of(before[i], base[i]);
      sum *= factors;
      float* tiles = &mixed[lane * width];
      for (int64_t i = 0; i < kLanes * width; i += kLanes)
        *reinterpret_cast<Floats*>(tiles + i) = load(tiles + i) * factors[i / kLanes % kLanes];
    }
    for (int64_t t = 0; t < there; ++t) {
      float* x = &logits[t * lanes + lane];
      for (int i = 0; i < kLanes; ++i) x[i] = exponential(x[i] * scale - base[i]);
      sum += load(x);
    }
    *reinterpret_cast<Floats*>(&peak[lane]) = top;
    *reinterpret_cast<Floats*>(&total[lane]) = sum;
    for (int64_t step = 0; step < kSteps; ++step) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t t = step * kPair + 2 * i;
        const Words even = t < there ? rounded(load(&logits[t * lanes + lane])) : Words{};
        const Words odd = t + 1 < there ? rounded(load(&logits[(t + 1) * lanes + lane])) : Words{};
        square[i] = even >> 16 | (odd & 0xffff0000u);
      }
      transpose_words(square);
      for (int i = 0; i < kLanes; ++i) put(&weights[(lane / kLanes * kSteps + step) * kTile + i * kLanes], square[i]);
    }
  }
}

// mixed[row][c] += Σ_t weights[row][t]·block[t][c]. next: the block that follows, or null.
void Part::mix(const T* block, const T* next) {
  for (int64_t c = 0; c < width; c += kPair) {
    alignas(64) uint32_t values[kSteps][2][kTile];
    for (int64_t t = 0; t < kBlock; t += 2) {
      const int64_t at = t * width + c;
      if (next) {
        __builtin_prefetch(next + at, 0, 2);
        __builtin_prefetch(next + at + width, 0, 2);
      }
      const Words a = words(block + at), b = words(block + at + width);
      put(&values[t / kPair][0][t % kPair / 2 * kLanes], (a & 0xffffu) | b << 16);
      put(&values[t / kPair][1][t % kPair / 2 * kLanes], a >> 16 | (b & 0xffff0000u));
    }
    all_is_stored();
    for (int64_t m = 0; m < lanes / kLanes; ++m) {
      float* even = &mixed[(m * (width / kLanes) + c / kLanes) * kTile];
      _tile_loadd(0, even, 64);
      _tile_loadd(1, even + kTile, 64);
      for (int64_t step = 0; step < kSteps; ++step) {
        _tile_loadd(2, &weights[(m * kSteps + step) * kTile], 64);
        _tile_loadd(3, values[step][0], 64);
        _tile_loadd(4, values[step][1], 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_dpbf16ps(1, 2, 4);
      }
      _tile_stored(0, even, 64);
      _tile_stored(1, even + kTile, 64);
    }
  }
}

// Of the five tiles that are used.
struct Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16};
};
alignas(64) const Shapes kShapes;

void Part::attend(const T* q, const T* tokens, int64_t count, float scale) {
  pack(q);
  _tile_loadconfig(&kShapes);
  std::vector<T> rest;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t there = std::min(kBlock, count - start);
    const T* block = tokens + start * width;
    if (there < kBlock) {
      rest.resize(kBlock * width);
      std::copy_n(block, there * width, rest.begin());
      block = rest.data();
    }
    score(block);
    weigh(there, scale, start == 0);
    mix(block, count - start >= 2 * kBlock ? block + kBlock * width : nullptr);
  }
  _tile_release();
}

void Part::add(int64_t row, float share, float* to) const {
  const float* tile = &mixed[row / kLanes * kLanes * width + row % kLanes * kLanes];
  for (int64_t c = 0; c < width; c += kPair, tile += 2 * kTile)
    for (int64_t i = 0; i < kLanes; ++i) {
      to[c + 2 * i] += share * tile[i];
      to[c + 2 * i + 1] += share * tile[kTile + i];
    }
}

}  // namespace

// Whether the system lets this process have tiles.
extern "C" bool has_tiles() {
  constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

// q [batch ≥ 1, rows, width]; tokens [batch, count ≥ 1, width], batches `stride` elements apart; a width of whole pairs of
// tiles. out [batch, rows, width] and totals [batch, rows]: the mixed tokens, and log Σ exp(logit).
extern "C" void attend_latents(const void* q, const void* tokens, int64_t batch, int64_t rows, int64_t count,
                               int64_t width, int64_t stride, float scale, float* out, float* totals) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  const int64_t each = std::max<int64_t>(1, std::min(threads() / batch, blocks));
  std::vector<Part> parts;
  parts.reserve(batch * each);
  for (int64_t job = 0; job < batch * each; ++job) parts.emplace_back(rows, width);
#pragma omp parallel for schedule(static) num_threads(threads()) if (parts.size() > 1)
  for (int64_t job = 0; job < batch * each; ++job) {
    const int64_t b = job / each, i = job % each;
    const int64_t first = blocks * i / each * kBlock, stop = std::min(count, blocks * (i + 1) / each * kBlock);
    parts[job].attend(static_cast<const T*>(q) + b * rows * width,
                      static_cast<const T*>(tokens) + b * stride + first * width, stop - first, scale);
  }
  std::fill_n(out, batch * rows * width, 0.0f);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t r = 0; r < rows; ++r) {
      const Part* of = &parts[b * each];
      float peak = kNothing, whole = 0.0f;
      for (int64_t i = 0; i < each; ++i) peak = std::max(peak, of[i].peak[r]);
      for (int64_t i = 0; i < each; ++i) whole += of[i].total[r] * weight_of(of[i].peak[r], base_of(peak));
      for (int64_t i = 0; i < each; ++i)
        of[i].add(r, weight_of(of[i].peak[r], base_of(peak)) / whole, out + (b * rows + r) * width);
      totals[b * rows + r] = peak + std::log(whole);
    }
}

#else

extern "C" bool has_tiles() { return false; }

#endif
