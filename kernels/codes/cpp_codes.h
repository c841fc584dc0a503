// What a stored scale, zero point and trellis code stand for: `params.py`, and `trellis.expanded`.

namespace {

// The dtype of the pairs in 16 bits (or 32), and of scales that are not rounded: each has a build of its own.
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

  // `count` scales, and the zero points behind them.
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

}  // namespace
