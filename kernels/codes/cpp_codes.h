// Decode stored scales, zero points and trellis codes: `params.py`, and `trellis.expanded`.

namespace {

// The dtype of exact pairs, and of scales that are not rounded; each dtype has a separate build.
typedef DTYPE T;

// Scales and zero points from number `first` of `of` on, in T or in 8 bits each.
struct Params {
  const void* of;
  int64_t first;
  bool eight;

  float scale(int64_t i) const {
    return eight ? static_cast<float>(Float16{static_cast<uint16_t>(static_cast<const uint8_t*>(of)[first + i] << 7)})
                 : static_cast<float>(static_cast<const T*>(of)[first + i]);
  }

  float zero(int64_t i, float scale) const {
    return eight ? static_cast<const int8_t*>(of)[first + i] * 0.125f * scale
                 : static_cast<float>(static_cast<const T*>(of)[first + i]);
  }

  // `count` scales, followed by the zero points.
  void read(int64_t count, float* scales, float* zeros) const {
    for (int64_t i = 0; i < count; ++i) scales[i] = scale(i);
    for (int64_t i = 0; i < count; ++i) zeros[i] = zero(count + i, scales[i]);
  }
};

// A trellis code of `width` bytes, in circles of `circle` bits, as a code of two bits a number: 2·width bytes.
inline void expand(const uint8_t* codes, int64_t width, int64_t circle, uint8_t* levels) {
  const int64_t size = circle / 8;
  const uint64_t all = ~uint64_t{0} >> (64 - circle), even = 0x5555555555555555;
  for (int64_t j = 0; j < width; j += size) {
    uint64_t bits = 0;
    std::memcpy(&bits, codes + j, size);
    auto earlier = [&](int by) { return (bits << by | bits >> (circle - by)) & all; };
    const uint64_t high = bits ^ earlier(1) ^ earlier(3), low = earlier(2);
    const uint64_t evens = (high & even) << 1 | (low & even), odds = (high & ~even) | (low >> 1 & even);
    std::memcpy(levels + j, &evens, size);
    std::memcpy(levels + width + j, &odds, size);
  }
}

#if LOOKS_UP
// Level - 3/2 of a window of four bits, the oldest lowest.
inline Floats levels_by_window() {
  Floats levels;
  for (int i = 0; i < kLanes; ++i) levels[i] = 2 * ((i >> 3 ^ i >> 2 ^ i) & 1) + (i >> 1 & 1) - 1.5f;
  return levels;
}

// The numbers of a trellis code of 8 or 16 bytes, in circles of 32: each circle is turned until a channel's window is
// lowest, and the level looked up. Lane i of vector v is channel p·width + j = 16·v + i, bit p of byte j.
template <int width>
inline void look_up(const uint8_t* codes, Floats levels, float* values) {
  typedef uint64_t Longs __attribute__((vector_size(kLanes * sizeof(float))));
  uint64_t a, b;
  std::memcpy(&a, codes, sizeof a);
  std::memcpy(&b, codes + width - sizeof b, sizeof b);
  const Words circle_of = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  Words circles = bits_of<Words>(looked_up(bits_of<Floats>(Longs{a, b, a, b, a, b, a, b}), circle_of)), turns;
  for (int i = 0; i < kLanes; ++i) turns[i] = (i % 4 * 8 + i / width + 29) % 32;
  circles = circles >> turns | circles << (-turns & 31);
  for (int v = 0; v < width / 2; ++v) {
    *reinterpret_cast<Floats*>(values + v * kLanes) = looked_up(levels, circles);
    circles = circles >> kLanes / width | circles << (32 - kLanes / width);
  }
}
#endif

}  // namespace
