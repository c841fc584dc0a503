// Decode stored parameters and the words of a record: `params.py`, `records.py` and `trellis.py`.

#include <vector>

namespace {

// Scales and zero points from number `first` of `of` on, in T (`library.py`: the pairs' dtype) or in 8 bits each.
struct Params {
  const void* of;
  int64_t first;
  bool eight;

  float scale(int64_t i) const {
    // The exponent moves from a bias of 15 to one of 127 by a multiplication, which subnormals survive too.
    return eight ? bits_of<float>(static_cast<uint32_t>(static_cast<const uint8_t*>(of)[first + i]) << 20) * 0x1p112f
                 : static_cast<float>(static_cast<const T*>(of)[first + i]);
  }

  float zero(int64_t i, float scale) const {
    return eight ? static_cast<const int8_t*>(of)[first + i] * 0.125f * scale
                 : static_cast<float>(static_cast<const T*>(of)[first + i]);
  }
};

constexpr int kRecord = 64, kQuads = 8;  // tokens of a record; values of g in a thread (g, q)

inline Words load_words(const uint32_t* from) { return *reinterpret_cast<const Words*>(from); }

template <int by>
inline Words turned(Words x) { return x << by | x >> (32 - by); }

// The words of a record's keys or values of `dim` channels. Blocks [l][g] of words belong to the four threads (g, q),
// `loads` to each. Words of one bit are expanded to two planes of 2-bit codes, for even and odd numbers.
struct Order {
  const bool trellis;
  const int dim, planes, bits, fields, loads, blocks, vectors, pitch;  // pitch: words from a block to the next one

  Order(int dim, int stored, bool trellis)
      : trellis(trellis), dim(dim), planes(stored == 1 ? 2 : 1), bits(planes * stored), fields(16 / stored),
        loads(std::min(4, dim / fields)), blocks(dim / fields / loads * kQuads),
        vectors(std::max(1, 4 * loads / kLanes)), pitch(copied() ? planes * vectors * kLanes : 4 * loads) {}

  bool copied() const { return planes == 2 || 4 * loads < kLanes; }
  int words() const { return copied() ? blocks * pitch : 0; }

  // The number of a lane's thread q, and its word of a load, in vector h of a block; lanes past the block have q >= 4.
  int thread(int h, int lane) const { return (h * kLanes + lane) / loads; }
  int word(int lane) const { return lane % loads; }

  // The record's words in whole vectors: [l][g][plane][vector], copied to `memory` if necessary.
  const uint32_t* whole(const uint32_t* record, uint32_t* memory) const {
    if (!copied()) return record;
    const int vector = std::min(kLanes, 4 * loads);
    uint32_t* to = memory;
    for (int block = 0; block < blocks; ++block, to += pitch)
      for (int i = 0; i < vectors; ++i, record += vector) {
        Words x = {}, *plane = reinterpret_cast<Words*>(to) + i;
        if (vector == kLanes) x = load_words(record);
        else std::memcpy(&x, record, vector * sizeof(uint32_t));
        const Words high = trellis ? x ^ turned<1>(x) ^ turned<3>(x) : Words{}, low = trellis ? turned<2>(x) : x;
        plane[0] = planes == 1 ? x : (low & 0x55555555u) | (high & 0x55555555u) << 1;
        if (planes == 2) plane[vectors] = (low >> 1 & 0x55555555u) | (high & 0xaaaaaaaau);
      }
    return memory;
  }
};

// The numbers under a mask, times two to the power of the mask's first bit; no mask has more than 16 bits.
inline Floats masked(Words x, Words mask) { return __builtin_convertvector(bits_of<Ints>(x & mask), Floats); }

}  // namespace
