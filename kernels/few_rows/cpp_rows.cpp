// A few rows times a matrix that is stored by output channel, summed in float32: y[r][o] = Σ_c x[r][c]·w[o][c] (+ bias[o]).
//
// The matrix is read once for all rows: as fast as memory gives it. Kernels for large products read it in panels that
// are packed first, and take twice as long for two rows as for one. A processor fetches ahead within a page of memory, and
// an output channel's weights are shorter: so what follows is asked for here.

#include <algorithm>
#include <vector>

namespace {

// What x, w, bias and y are made of: each has a build of its own.
typedef DTYPE T;

// Output channels whose sums are in registers at once, beside R rows.
constexpr int64_t kOutputs = 2;
// Output channels that weights are asked for ahead.
constexpr int64_t kAhead = 4;

template <int R, int O>
inline void dots(const float* x, const T* w, const T* bias, int64_t channels, int64_t outputs, T* y) {
  Floats sums[O][R] = {};
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes)
    for (int o = 0; o < O; ++o) {
      const Floats weights = load(w + o * channels + c);
      __builtin_prefetch(w + (o + kAhead) * channels + c);
      for (int r = 0; r < R; ++r) sums[o][r] += load(x + r * channels + c) * weights;
    }
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) {
      float sum = bias ? static_cast<float>(bias[o]) : 0.0f;
      for (int i = 0; i < kLanes; ++i) sum += sums[o][r][i];
      for (int64_t rest = c; rest < channels; ++rest) sum += x[r * channels + rest] * static_cast<float>(w[o * channels + rest]);
      store(sum, y + r * outputs + o);
    }
}

template <int R>
void product(const T* rows, const T* w, const T* bias, int64_t channels, int64_t outputs, T* y) {
  const std::vector<float> floats(rows, rows + R * channels);
  const float* x = floats.data();
  const int64_t blocks = (outputs + kOutputs - 1) / kOutputs;
#pragma omp parallel for schedule(static)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block * kOutputs, stop = std::min(outputs, first + kOutputs);
    const T* from = bias ? bias + first : nullptr;
    if (stop - first == kOutputs)
      dots<R, kOutputs>(x, w + first * channels, from, channels, outputs, y + first);
    else
      for (int64_t o = first; o < stop; ++o)
        dots<R, 1>(x, w + o * channels, bias ? bias + o : nullptr, channels, outputs, y + o);
  }
}

}  // namespace

// x [rows, channels], rows 1 to 4; w [outputs, channels]; bias [outputs] or null; y [rows, outputs].
extern "C" void few_rows(const T* x, const T* w, const T* bias, int64_t rows, int64_t channels, int64_t outputs, T* y) {
  auto run = rows == 1 ? product<1> : rows == 2 ? product<2> : rows == 3 ? product<3> : product<4>;
  run(x, w, bias, channels, outputs, y);
}
