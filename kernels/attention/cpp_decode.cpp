// A decode step's attention over the tiers on a CPU: `attention_ops.decode_attention`, and its two halves around a
// correction. The work is split into jobs: chunks of each head's low-bit tier, and one job of its 16-bit pairs (slots,
// window, new pairs). Jobs follow the pages, whose heads are adjacent in memory, so that a processor prefetches them.

namespace {

// The low-bit tier's logits.
void low_bit_logits(const Attention& a) {
  const int64_t jobs = a.pairs * a.chunks;
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < jobs; ++job)
    a.chunk_logits(job % a.pairs, job / a.pairs * kChunk);
}

// Each lane's scores, independent of the slots.
void score(const StepArguments& step) {
  Attention a(step);
  a.arrange_query();
  Parts parts(a.jobs(), a.rows, 0);
  std::vector<std::vector<float>> exact(a.pairs);
  std::vector<float> peaks(a.pairs * a.rows), shares(a.pairs * a.rows);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < a.jobs(); ++job) {
    const int64_t head = job % a.pairs, chunk = job / a.pairs, start = chunk * kChunk;
    const float* logits = a.logits_of(head) + start;
    int64_t stride = step.capacity, count = std::min(a.low_bit(head) - start, kChunk);
    if (chunk == a.chunks) {
      for (int64_t m = 0; m < a.rows; ++m)
        std::fill(a.logits_of(head) + m * stride + a.low_bit(head), a.logits_of(head) + (m + 1) * stride, kNothing);
      exact[head] = a.exact_logits(head, a.recent_pairs(head));
      logits = exact[head].data();
      count = stride = exact[head].size() / a.rows;
    } else if (count > 0) {
      a.chunk_logits(head, start);
    } else {
      continue;  // the row is shorter
    }
    Part part = parts[head * (a.chunks + 1) + chunk];
    for (int64_t m = 0; m < a.rows; ++m) {
      const float *row = logits + m * stride, top = largest(row, count), base = base_of(top);
      float total = 0.0f;
      for (int64_t t = 0; t < count; ++t) total += weight_of(row[t], base);
      part.peak[m] = top;
      part.total[m] = total;
    }
  }
  for (int64_t head = 0; head < a.pairs; ++head) a.denominators(parts, head, &peaks[head * a.rows], &shares[head * a.rows]);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < a.jobs(); ++job) {
    const int64_t head = job % a.pairs, chunk = job / a.pairs, start = chunk * kChunk;
    const float *peak = &peaks[head * a.rows], *share = &shares[head * a.rows];
    for (int64_t lane = 0; lane < step.lanes; ++lane) {
      float* scores = a.scores_of(lane, head);
      if (chunk < a.chunks) {
        const int64_t stop = std::min(a.low_bit(head), start + kChunk);
        a.candidate_scores(head, lane, a.logits_of(head) + start, step.capacity, start, stop, peak, share, scores + start);
      } else {
        const int64_t stride = exact[head].size() / a.rows, low_bit = a.low_bit(head);
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
  std::vector<float> peaks(a.rows * a.pairs), shares(a.rows * a.pairs), cuts(s.skip_below > 0 ? a.rows * a.pairs : 0);
  std::vector<std::vector<float>> exact(a.pairs);
  std::vector<int64_t> in_slots(a.pairs);
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t head = 0; head < a.pairs; ++head) {
    std::vector<Pair> pairs = a.slot_pairs(head);
    const std::vector<Pair> recent = a.recent_pairs(head);
    in_slots[head] = pairs.size();
    pairs.insert(pairs.end(), recent.begin(), recent.end());
    exact[head] = a.exact_mix(head, pairs, parts[head * (a.chunks + 1) + a.chunks]);
    if (cuts.empty()) continue;
    std::vector<float> weights(a.rows * kChunk);
    for (int64_t start = 0; start < a.low_bit(head); start += kChunk)
      a.chunk_weights(head, start, nullptr, weights.data(), parts[head * (a.chunks + 1) + start / kChunk]);
    a.denominators(parts, head, &peaks[head * a.rows], &shares[head * a.rows]);
    for (int64_t i = head * a.rows; i < (head + 1) * a.rows; ++i) cuts[i] = peaks[i] + std::log(s.skip_below / shares[i]);
  }
  const int64_t jobs = a.pairs * a.chunks;
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < jobs; ++job) {
    const int64_t head = job % a.pairs, chunk = job / a.pairs;
    const float* cut = cuts.empty() ? nullptr : &cuts[head * a.rows];
    a.chunk_mix(head, chunk * kChunk, cut, parts[head * (a.chunks + 1) + chunk]);
  }
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t head = 0; head < a.pairs; ++head) {
    float *peak = &peaks[head * a.rows], *share = &shares[head * a.rows];
    if (cuts.empty()) a.denominators(parts, head, peak, share);
    a.merge(parts, head);
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
  Attention a(*step);
  a.arrange_query();
  low_bit_logits(a);
  attend(a);
}

extern "C" void score_low_bit(const StepArguments* step) { score(*step); }

extern "C" void attend_scored(const StepArguments* step) { attend(Attention(*step)); }
