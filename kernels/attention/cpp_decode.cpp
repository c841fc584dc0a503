// A decode step's attention over the tiers on a CPU: `attention_ops.decode_attention`, and its two halves around a
// correction. The work is split into jobs: chunks of each head's low-bit tier, and one job of its 16-bit pairs (slots,
// window, new pairs). Jobs follow the pages, whose heads are adjacent in memory, so that a processor prefetches them.

namespace {

template <typename Do>
void each_job(const Attention& a, int64_t jobs, Do&& what) {
#pragma omp parallel for schedule(static) num_threads(threads()) if (a.worth_threads())
  for (int64_t job = 0; job < jobs; ++job) what(job);
}

// Call what(head, first token) for each chunk of the low-bit tiers.
template <typename Do>
void each_chunk(const Attention& a, Do&& what) {
  each_job(a, a.pairs * a.chunks, [&](int64_t job) {
    const int64_t head = job % a.pairs, start = job / a.pairs * kChunk;
    if (start < a.low_bit(head)) what(head, start);
  });
}

// A head's scores for one lane: from the low-bit tier's logits, and from those of 16-bit pairs, which begin with `slots`.
void write_scores(const Attention& a, int64_t head, int64_t lane, const std::vector<Pair>& slots,
                  const std::vector<float>& exact, const float* peak, const float* share, float* scores) {
  const int64_t stride = exact.size() / a.rows, low_bit = a.low_bit(head), count = slots.size();
  std::fill_n(scores, a.s.capacity, -1.0f);
  a.candidate_scores(head, lane, a.logits_of(head), a.s.capacity, 0, low_bit, peak, share, scores);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = slots[i].token;
    a.candidate_scores(head, lane, exact.data() + i, stride, token, token + 1, peak, share, scores + token);
  }
  a.candidate_scores(head, lane, exact.data() + count, stride, low_bit, a.length(head), peak, share, scores + low_bit);
}

// The output, and the last lane's scores if step.scores is given.
void attend(const Attention& a) {
  const StepArguments& s = a.s;
  Parts parts(a.jobs(), a.rows, s.d);
  std::vector<float> peaks(a.rows * a.pairs), shares(a.rows * a.pairs), cuts(s.skip_below > 0 ? a.rows * a.pairs : 0);
  std::vector<std::vector<float>> exact(a.pairs);
  each_job(a, a.pairs, [&](int64_t head) {
    std::vector<Pair> pairs = a.slot_pairs(head);
    const std::vector<Pair> recent = a.recent_pairs(head);
    pairs.insert(pairs.end(), recent.begin(), recent.end());
    exact[head] = a.exact_mix(head, pairs, parts[head * (a.chunks + 1) + a.chunks]);
    if (cuts.empty()) return;
    std::vector<float> weights(a.rows * kChunk);
    for (int64_t start = 0; start < a.low_bit(head); start += kChunk)
      a.chunk_weights(head, start, nullptr, weights.data(), parts[head * (a.chunks + 1) + start / kChunk]);
    a.denominators(parts, head, &peaks[head * a.rows], &shares[head * a.rows]);
    for (int64_t i = head * a.rows; i < (head + 1) * a.rows; ++i) cuts[i] = peaks[i] + std::log(s.skip_below / shares[i]);
  });
  each_chunk(a, [&](int64_t head, int64_t start) {
    const float* cut = cuts.empty() ? nullptr : &cuts[head * a.rows];
    a.chunk_mix(head, start, cut, parts[head * (a.chunks + 1) + start / kChunk]);
  });
  each_job(a, a.pairs, [&](int64_t head) {
    float *peak = &peaks[head * a.rows], *share = &shares[head * a.rows];
    if (cuts.empty()) a.denominators(parts, head, peak, share);
    a.merge(parts, head);
    if (!s.scores) return;
    float* scores = s.scores + head * s.capacity;
    if (s.top_k) write_scores(a, head, s.lanes - 1, a.slot_pairs(head), exact[head], peak, share, scores);
    else std::fill_n(scores, s.capacity, -1.0f);
  });
}

}  // namespace

extern "C" void decode_attention(const StepArguments* step) {
  Attention a(*step);
  a.arrange_query();
  each_chunk(a, [&](int64_t head, int64_t start) { a.chunk_logits(head, start); });
  attend(a);
}

// Each lane's scores, independent of the slots.
extern "C" void score_low_bit(const StepArguments* step) {
  Attention a(*step);
  a.arrange_query();
  const StepArguments& s = a.s;
  Parts parts(a.jobs(), a.rows, 0);
  each_chunk(a, [&](int64_t head, int64_t start) {
    a.chunk_logits(head, start);
    const int64_t count = std::min(a.low_bit(head) - start, kChunk);
    a.totals(a.logits_of(head) + start, s.capacity, count, parts[head * (a.chunks + 1) + start / kChunk]);
  });
  each_job(a, a.pairs, [&](int64_t head) {
    std::vector<float> peak(a.rows), share(a.rows);
    const std::vector<float> exact = a.exact_logits(head, a.recent_pairs(head));
    a.totals(exact.data(), exact.size() / a.rows, exact.size() / a.rows, parts[head * (a.chunks + 1) + a.chunks]);
    a.denominators(parts, head, peak.data(), share.data());
    for (int64_t lane = 0; lane < s.lanes; ++lane)
      write_scores(a, head, lane, {}, exact, peak.data(), share.data(), s.scores + (lane * a.pairs + head) * s.capacity);
    for (int64_t m = 0; m < a.rows; ++m)
      std::fill_n(a.logits_of(head) + m * s.capacity + a.low_bit(head), s.capacity - a.low_bit(head), kNothing);
  });
}

extern "C" void attend_scored(const StepArguments* step) { attend(Attention(*step)); }
