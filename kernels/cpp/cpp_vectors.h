// Vectors and the number of threads, in front of every C++ kernel.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
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

// The bits of the largest size, which sort like sizes: infinities and NaN are the largest.
template <typename T>
inline int32_t largest_bits(const T* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bits_of<int32_t>(static_cast<float>(x[i])) & INT32_MAX);
  return largest;
}

typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t)), aligned(4)));

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

}  // namespace

