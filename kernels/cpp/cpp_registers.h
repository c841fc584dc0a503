// Operations on registers of sixteen numbers (AVX-512): a table look-up and a transposition. LOOKS_UP: whether the
// processor has them.

#ifdef __AVX512F__
#define LOOKS_UP 1

namespace {

// Columns of words that `words_of` transposes.
constexpr int kColumns = 4;

// table[index & 15] in each lane.
inline Floats looked_up(Floats table, Words index) {
  return bits_of<Floats>(_mm512_permutexvar_ps(bits_of<__m512i>(index), bits_of<__m512>(table)));
}

// Four words of each of sixteen rows, `stride` bytes apart, to sixteen of each column.
inline void words_of(const uint8_t* from, int64_t stride, Words* columns) {
  const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * stride)); };
  __m512i rows[4];
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(i + 4), 1);
    rows[i] = _mm512_inserti32x4(_mm512_inserti32x4(rows[i], row(i + 8), 2), row(i + 12), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i c = _mm512_unpackhi_epi32(rows[0], rows[1]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  columns[0] = bits_of<Words>(_mm512_unpacklo_epi64(a, b));
  columns[1] = bits_of<Words>(_mm512_unpackhi_epi64(a, b));
  columns[2] = bits_of<Words>(_mm512_unpacklo_epi64(c, d));
  columns[3] = bits_of<Words>(_mm512_unpackhi_epi64(c, d));
}

}  // namespace
#else
#define LOOKS_UP 0
#endif
