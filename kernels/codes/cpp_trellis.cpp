// `trellis.quantize_records` in C++. Viterbi's search runs one circle in each lane of a vector.

#include <cmath>

namespace {

constexpr int kMemory = 3, kStates = 1 << kMemory, kCircle = 32, kTokens = 64;
constexpr float kFar = 1e30f, kStep = 0.8f, kLeastCosine = 0.25f;
// Records above which a second thread saves more than it costs.
constexpr int64_t kManyRecords = 4;

struct Costs {
  Floats of[kStates];
};

// q of a window of four bits, the newest lowest: `trellis.levels_of`.
template <typename Bits>
constexpr Bits level_of(Bits window) { return 2 * ((window ^ window >> 1 ^ window >> 3) & 1) + (window >> 2 & 1); }

// One step on. Bit s of a lane's result: state s was reached from the one before that has its oldest bit set.
inline Ints step(Floats x, Costs& costs) {
  Floats apart[4];
  for (int q = 0; q < 4; ++q) {
    const float level = q - 1.5f;
    apart[q] = level * level / 2 - x * level;
  }
  Costs next;
  Ints choice = {};
  for (int state = 0; state < kStates; ++state) {
    const Floats first = costs.of[state >> 1] + apart[level_of(state)];
    const Floats second = costs.of[state >> 1 | kStates >> 1] + apart[level_of(state | kStates)];
    const Ints nearer = second < first;
    next.of[state] = nearer ? second : first;
    choice |= nearer & 1 << state;
  }
  costs = next;
  return choice;
}

inline Ints nearest(const Costs& costs) {
  Floats best = costs.of[0];
  Ints end = {};
  for (int state = 1; state < kStates; ++state) {
    const Ints nearer = costs.of[state] < best;
    best = nearer ? costs.of[state] : best;
    end = nearer ? Ints{} + state : end;
  }
  return end;
}

inline Ints before(Ints state, Ints choice) { return state >> 1 | (choice >> state & 1) << (kMemory - 1); }

// Encode kLanes circles, which are the numbers at `order` [kLanes, kCircle], as words; also write their levels r.
void encode(const float* numbers, const int64_t* order, uint32_t* words, float* levels) {
  Floats x[kCircle];
  Ints choices[kCircle];
  for (int t = 0; t < kCircle; ++t)
    for (int i = 0; i < kLanes; ++i) x[t][i] = numbers[order[i * kCircle + t]];
  Costs costs = {};
  for (int t = kCircle / 2; t < kCircle; ++t) step(x[t], costs);
  for (int t = 0; t < kCircle / 2; ++t) choices[t] = step(x[t], costs);
  Ints edge = nearest(costs);
  for (int t = kCircle / 2; t-- > 0;) edge = before(edge, choices[t]);

  for (int state = 0; state < kStates; ++state) costs.of[state] = edge == state ? Floats{} : Floats{} + kFar;
  for (int t = 0; t < kCircle; ++t) choices[t] = step(x[t], costs);
  Ints state = edge, word = {};
  for (int t = kCircle; t-- > 0;) {
    const Ints level = level_of<Ints>(state | (choices[t] >> state & 1) << kMemory);
    for (int i = 0; i < kLanes; ++i) levels[order[i * kCircle + t]] = level[i] - 1.5f;
    word |= (state & 1) << t;
    state = before(state, choices[t]);
  }
  for (int i = 0; i < kLanes; ++i) words[i] = word[i];
}

}  // namespace

// Quantise records x [count, 64, dim] with d channels before the padding. order [64 * dim]: `records.order_of`.
// Results: words [count, 2 * dim], scales [count, 64].
extern "C" void quantize(const float* x, int64_t count, int64_t dim, int64_t d, const int64_t* order, uint32_t* words,
                         float* scales) {
#pragma omp parallel for num_threads(threads()) if (count > kManyRecords)
  for (int64_t r = 0; r < count; ++r) {
    std::vector<float> units(kTokens * dim), numbers(units), levels(units), squares(kTokens), peaks(kTokens);
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* row = x + (r * kTokens + t) * dim;
      peaks[t] = bits_of<float>(largest_bits(row, d));
      float* unit = &units[t * dim];
      for (int64_t c = 0; c < dim; ++c) unit[c] = peaks[t] > 0.0f ? row[c] / peaks[t] : 0.0f;
      for (int64_t c = 0; c < dim; ++c) squares[t] += unit[c] * unit[c];
      const float distance = std::sqrt(squares[t] / d) * kStep;
      for (int64_t c = 0; c < dim; ++c) numbers[t * dim + c] = distance > 0.0f ? unit[c] / distance : 0.0f;
    }
    for (int64_t circle = 0; circle < 2 * dim; circle += kLanes)
      encode(numbers.data(), order + circle * kCircle, words + r * 2 * dim + circle, levels.data());
    for (int64_t t = 0; t < kTokens; ++t) {
      const float *unit = &units[t * dim], *level = &levels[t * dim];
      float along = 0.0f, size = 0.0f;
      for (int64_t c = 0; c < d; ++c) along += unit[c] * level[c];
      for (int64_t c = 0; c < d; ++c) size += level[c] * level[c];
      along = std::max(along, kLeastCosine * std::sqrt(squares[t] * size));
      scales[r * kTokens + t] = squares[t] > 0.0f ? peaks[t] * (squares[t] / along) : 0.0f;
    }
  }
}
