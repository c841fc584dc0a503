// A few rows times a matrix that is stored by output channel, summed in float32: y[r][o] = Σ_c x[r][c]·w[o][c] (+ bias[o]).
//
// The matrix is read once for all rows, at memory bandwidth. Kernels for large products pack panels first, and take twice
// as long for two rows as for one. Processors prefetch within a page of memory, and an output channel's weights are
// shorter, so this code prefetches the following weights.

#include <algorithm>
#include <vector>

namespace {

// The dtype of x, w, bias and y; each dtype has a separate build.
typedef DTYPE T;

// Numbers of a register: gcc keeps sums of vectors that are longer in memory.
#if defined(__AVX512F__)
constexpr int kRun = kLanes;
#elif defined(__AVX__)
constexpr int kRun = kLanes / 2;
#else
constexpr int kRun = kLanes / 4;
#endif
typedef float Run __attribute__((vector_size(kRun * sizeof(float)), aligned(4)));

inline Run run_of(const float* from) { return *reinterpret_cast<const Run*>(from); }

inline Run run_of(const BFloat16* from) {
  typedef uint16_t Shorts __attribute__((vector_size(kRun * sizeof(uint16_t)), aligned(2)));
  typedef uint32_t Longs __attribute__((vector_size(kRun * sizeof(uint32_t)), aligned(4)));
  return bits_of<Run>(__builtin_convertvector(*reinterpret_cast<const Shorts*>(from), Longs) << 16);
}

// Output channels whose sums are in registers at once, with R rows.
constexpr int64_t kOutputs = 2;
// Output channels whose weights are prefetched.
constexpr int64_t kAhead = 4;

template <int R, int O>
inline void dots(const float* x, const T* w, const T* bias, int64_t channels, int64_t outputs, T* y) {
  constexpr int kRuns = kLanes / kRun;
  Run sums[O][R][kRuns] = {};
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes)
    for (int o = 0; o < O; ++o) {
      __builtin_prefetch(w + (o + kAhead) * channels + c);
#pragma GCC unroll 4
      for (int i = 0; i < kRuns; ++i) {
        const Run weights = run_of(w + o * channels + c + i * kRun);
        for (int r = 0; r < R; ++r) sums[o][r][i] += run_of(x + r * channels + c + i * kRun) * weights;
      }
    }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float sum = bias ? static_cast<float>(bias[o]) : 0.0f;
      for (int i = 0; i < kLanes; ++i) sum += sums[o][r][i / kRun][i % kRun];
      for (int64_t rest = c; rest < channels; ++rest) sum += x[r * channels + rest] * static_cast<float>(w[o * channels + rest]);
      store(sum, y + r * outputs + o);
    }
}

// A matrix, its bias or null, and where the product goes.
struct Weight {
  const T* w;
  const T* bias;
  int64_t outputs;
  T* y;
  int64_t blocks() const { return (outputs + kOutputs - 1) / kOutputs; }
};

template <int R>
void products(const T* rows, const Weight* weights, int64_t count, int64_t channels) {
  const std::vector<float> floats(rows, rows + R * channels);
  const float* x = floats.data();
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += weights[i].blocks();
#pragma omp parallel for schedule(static) num_threads(threads())
  for (int64_t block = 0; block < blocks; ++block) {
    int64_t first = block * kOutputs;
    const Weight* of = weights;
    for (; first >= of->blocks() * kOutputs; ++of) first -= of->blocks() * kOutputs;
    const int64_t stop = std::min(of->outputs, first + kOutputs);
    if (stop - first == kOutputs)
      dots<R, kOutputs>(x, of->w + first * channels, of->bias ? of->bias + first : nullptr, channels, of->outputs,
                        of->y + first);
    else
      for (int64_t o = first; o < stop; ++o)
        dots<R, 1>(x, of->w + o * channels, of->bias ? of->bias + o : nullptr, channels, of->outputs, of->y + o);
  }
}

}  // namespace

// x [rows, channels], rows 1 to 4; of each of `count` products w [outputs, channels], bias [outputs] or null,
// y [rows, outputs].
extern "C" void few_rows(const T* x, const Weight* weights, int64_t count, int64_t rows, int64_t channels) {
  auto run = rows == 1 ? products<1> : rows == 2 ? products<2> : rows == 3 ? products<3> : products<4>;
  run(x, weights, count, channels);
}
