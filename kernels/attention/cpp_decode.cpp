// A decode step's attention over the tiers on a CPU: `attention_ops.decode_attention`, and its two halves around a
// correction. The work is split into jobs: chunks of each head's low-bit tier, and one job of its 16-bit pairs (slots,
// window, new pairs).

namespace {

#define FOR_BITS(bits, call)                                  \
  switch (bits) {                                             \
    case 1: { constexpr int kBits = 1; call; break; }         \
    case 2: { constexpr int kBits = 2; call; break; }         \
    case 4: { constexpr int kBits = 4; call; break; }         \
    case 8: { constexpr int kBits = 8; call; break; }         \
    default: { constexpr int kBits = 16; call; }              \
  }

// The low-bit tier's logits.
void low_bit_logits(const Attention& a) {
  const int64_t jobs = a.pairs * a.chunks;
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < jobs; ++job)
    FOR_BITS(a.s.key_bits, a.chunk_logits<kBits>(job / a.chunks, job % a.chunks * kChunk))
}

// Each lane's scores, independent of the slots.
void score(const StepArguments& step) {
  const Attention a(step);
  Parts parts(a.jobs(), a.rows, 0);
  std::vector<std::vector<float>> exact(a.pairs);
  std::vector<float> peaks(a.pairs * a.rows), shares(a.pairs * a.rows);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < a.jobs(); ++job) {
    const int64_t head = job / (a.chunks + 1), chunk = job % (a.chunks + 1), start = chunk * kChunk;
    const float* logits = a.logits_of(head) + start;
    int64_t stride = step.capacity, count = std::min(a.low_bit(head) - start, kChunk);
    if (chunk == a.chunks) {
      for (int64_t m = 0; m < a.rows; ++m)
        std::fill(a.logits_of(head) + m * stride + a.low_bit(head), a.logits_of(head) + (m + 1) * stride, kNothing);
      const std::vector<Pair> recent = a.recent_pairs(head);
      count = stride = recent.size();
      exact[head] = a.exact_logits(head, recent, stride);
      logits = exact[head].data();
    } else if (count > 0) {
      FOR_BITS(step.key_bits, a.chunk_logits<kBits>(head, start))
    } else {
      continue;  // the row is shorter
    }
    Part part = parts[job];
    for (int64_t m = 0; m < a.rows; ++m) {
      const float* row = logits + m * stride;
      float total = 0.0f;
      const float top = largest(row, count);
      const float base = base_of(top);
      for (int64_t t = 0; t < count; ++t) total += weight_of(row[t], base);
      part.peak[m] = top;
      part.total[m] = total;
    }
  }
  for (int64_t head = 0; head < a.pairs; ++head)
    for (int64_t m = 0; m < a.rows; ++m)
      a.denominator(parts, head, m, &peaks[head * a.rows + m], &shares[head * a.rows + m]);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < a.jobs(); ++job) {
    const int64_t head = job / (a.chunks + 1), chunk = job % (a.chunks + 1), start = chunk * kChunk;
    const float *peak = &peaks[head * a.rows], *share = &shares[head * a.rows];
    for (int64_t lane = 0; lane < step.lanes; ++lane) {
      float* scores = a.scores_of(lane, head);
      if (chunk < a.chunks) {
        const int64_t stop = std::min(a.low_bit(head), start + kChunk);
        a.candidate_scores(head, lane, a.logits_of(head) + start, step.capacity, start, stop, peak, share, scores + start);
      } else {
        const int64_t stride = exact[head].size() / a.rows;
        const int64_t low_bit = a.low_bit(head);
        a.candidate_scores(head, lane, exact[head].data(), stride, low_bit, a.length(head), peak, share, scores + low_bit);
        std::fill(scores + a.candidates(head), scores + step.capacity, -1.0f);
      }
    }
  }
}

// The output, and the last lane's scores if step.scores is given.
void attend(const Attention& a) {
  const StepArguments& s = a.s;
  Parts parts(a.jobs(), a.rows, s.d);
  std::vector<float> peaks(a.rows * a.pairs), shares(a.rows * a.pairs);
  std::vector<std::vector<float>> exact(a.pairs);
  std::vector<int64_t> in_slots(a.pairs);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < a.jobs(); ++job) {
    const int64_t head = job / (a.chunks + 1), chunk = job % (a.chunks + 1);
    if (chunk < a.chunks) {
      FOR_BITS(a.s.value_bits, a.chunk_mix<kBits>(head, chunk * kChunk, parts[job]))
    } else {
      std::vector<Pair> pairs = a.slot_pairs(head);
      const std::vector<Pair> recent = a.recent_pairs(head);
      in_slots[head] = pairs.size();
      pairs.insert(pairs.end(), recent.begin(), recent.end());
      exact[head] = a.exact_mix(head, pairs, parts[job]);
    }
  }
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t head = 0; head < a.pairs; ++head) {
    float *peak = &peaks[head * a.rows], *share = &shares[head * a.rows];
    a.merge(parts, head, peak, share);
    if (!s.scores) continue;
    const int64_t lane = s.lanes - 1, stride = exact[head].size() / a.rows;
    float* scores = s.scores + head * s.capacity;
    std::fill_n(scores, s.capacity, -1.0f);
    if (!s.top_k) continue;
    const int64_t low_bit = a.low_bit(head);
    a.candidate_scores(head, lane, a.logits_of(head), s.capacity, 0, low_bit, peak, share, scores);
    const std::vector<Pair> slots = a.slot_pairs(head);
    for (int64_t i = 0; i < in_slots[head]; ++i)
      a.candidate_scores(head, lane, exact[head].data() + i, stride, slots[i].token, slots[i].token + 1, peak, share,
                         scores + slots[i].token);
    a.candidate_scores(head, lane, exact[head].data() + in_slots[head], stride, low_bit, a.length(head), peak, share,
                       scores + low_bit);
  }
}

}  // namespace

extern "C" void decode_attention(const StepArguments* step) {
  const Attention a(*step);
  low_bit_logits(a);
  attend(a);
}

extern "C" void score_low_bit(const StepArguments* step) { score(*step); }

extern "C" void attend_scored(const StepArguments* step) { attend(Attention(*step)); }
