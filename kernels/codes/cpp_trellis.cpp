// `trellis.encode`: Viterbi's search, one circle in each lane of a vector.

#include <algorithm>

namespace {

constexpr int kMemory = 3, kStates = 1 << kMemory, kMost = 64;
constexpr float kFar = 1e30f;

struct Costs {
  Floats of[kStates];
};

// q of a window of four bits, the newest lowest: `trellis.levels_of`.
constexpr int level_of(int window) { return 2 * ((window ^ window >> 1 ^ window >> 3) & 1) + (window >> 2 & 1); }

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

}  // namespace

// circles [count, length] of unit step → codes [count, length / 8].
extern "C" void encode(const float* circles, int64_t count, int64_t length, uint8_t* codes) {
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - first), half = length / 2;
    Floats x[kMost] = {};
    for (int64_t t = 0; t < length; ++t)
      for (int64_t i = 0; i < lanes; ++i) x[t][i] = circles[(first + i) * length + t];
    Ints choices[kMost];

    Costs costs = {};
    for (int64_t t = length - half; t < length; ++t) step(x[t], costs);
    for (int64_t t = 0; t < length - half; ++t) choices[t] = step(x[t], costs);
    Ints edge = nearest(costs);
    for (int64_t t = length - half; t-- > 0;) edge = before(edge, choices[t]);

    for (int state = 0; state < kStates; ++state)
      costs.of[state] = edge == state ? Floats{} : Floats{} + kFar;
    for (int64_t t = 0; t < length; ++t) choices[t] = step(x[t], costs);
    Ints state = edge;
    for (int64_t t = length; t-- > 0;) {
      const Ints choice = choices[t];
      choices[t] = state & 1;
      state = before(state, choice);
    }
    for (int64_t j = 0; j < length / 8; ++j) {
      Ints byte = {};
      for (int p = 0; p < 8; ++p) byte |= choices[j * 8 + p] << p;
      for (int64_t i = 0; i < lanes; ++i) codes[(first + i) * (length / 8) + j] = byte[i];
    }
  }
}
