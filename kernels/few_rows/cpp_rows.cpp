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

// Vectors of channels whose sums are in registers at once.
constexpr int kVectors = 16 / kLanes;
// Output channels whose sums are in registers at once, with R rows.
constexpr int64_t kOutputs = 2;
// Output channels whose weights are prefetched.
constexpr int64_t kAhead = 4;

template <int R, int O>
inline void dots(const float* x, const T* w, const T* bias, int64_t channels, int64_t outputs, T* y) {
  Floats sums[O][R][kVectors] = {};
  int64_t c = 0;
  for (; c + kVectors * kLanes <= channels; c += kVectors * kLanes)
    for (int o = 0; o < O; ++o) {
      __builtin_prefetch(w + (o + kAhead) * channels + c);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        const Floats weights = load(w + o * channels + c + i * kLanes);
        for (int r = 0; r < R; ++r) sums[o][r][i] += load(x + r * channels + c + i * kLanes) * weights;
      }
    }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float sum = bias ? static_cast<float>(bias[o]) : 0.0f;
      for (int i = 0; i < kVectors * kLanes; ++i) sum += sums[o][r][i / kLanes][i % kLanes];
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
