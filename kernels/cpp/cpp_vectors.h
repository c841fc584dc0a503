// Vectors, the 16-bit dtypes and the number of threads, in front of every C++ kernel.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// The process's number of threads, but at most the number of cores. With more threads OpenMP puts threads to sleep
// between kernels, and each of a step's two hundred kernels would wake them.
inline int threads() {
#ifdef _OPENMP
  static const int cores = std::max(1u, std::thread::hardware_concurrency());
  return std::min(omp_get_max_threads(), cores);
#else
  return 1;
#endif
}

// Numbers in a register: gcc keeps longer vectors in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4)));

// a·b + c. Written out: gcc reorders what it contracts itself into products and sums.
inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Memory of `count` numbers that begins at a cache line: vectors that lie in two lines load slowly.
template <typename Number>
struct Aligned {
  struct alignas(64) Line {
    Number of[64 / sizeof(Number)];
  };
  std::vector<Line> lines;
  explicit Aligned(int64_t count = 0) : lines(count * sizeof(Number) / 64 + 1) {}
  Number* data() { return lines[0].of; }
  const Number* data() const { return lines[0].of; }
};

// Keep a loaded vector in a register: gcc loads it again for each use, and loads are the limit.
inline Floats held(Floats x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#endif
  return x;
}

template <typename To, typename From>
inline To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return bits_of<float>(static_cast<uint32_t>(bits) << 16); }
};

struct Float16 {
  uint16_t bits;
  operator float() const {
    // The exponent moves from a bias of 15 to one of 127 by a multiplication, which subnormals survive too.
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fff) << 13;
    const float finite = bits_of<float>(magnitude) * 0x1p112f;
    const float value = magnitude >= 0x0f800000 ? bits_of<float>(magnitude | 0x7f800000u) : finite;
    return bits & 0x8000 ? -value : value;
  }
};

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2)));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

inline Floats load(const BFloat16* from) {
  return bits_of<Floats>(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}

inline void store(float value, float* to) { *to = value; }

// To the nearest, of two the even one.
inline void store(float value, BFloat16* to) {
  const uint32_t bits = bits_of<uint32_t>(value);
  to->bits = value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}

inline void store(float value, Float16* to) {
  const uint32_t bits = bits_of<uint32_t>(value), magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude >= 0x47800000) half = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  else if (magnitude >= 0x38800000) half = (magnitude + 0xc8000fff + ((magnitude >> 13) & 1)) >> 13;
  else half = bits_of<uint32_t>(bits_of<float>(magnitude) + 0.5f) - 0x3f000000;  // a subnormal's last place is a 0.5's
  to->bits = half | (bits >> 16 & 0x8000);
}

}  // namespace

