// Products for many tokens at once: the lanes of vectors are tokens.
//
// Dot products along a row (vectors.h) end with the sum of a vector's lanes, which takes as
// long as the products do where a row is short. Here a panel holds some tokens side by
// side, and each number of a row of weights is multiplied with all of them, so that
// nothing is summed across lanes. Weights stay as they lie in memory.
//
// A unit is what one lane multiplies and adds: a float32, or two bfloat16 next to each
// other. Suffixes: U units, L lanes of a panel.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// Within others GCC spreads their sums over the stack.
#define ALONE __attribute__((noinline))

// What stays in registers: sums of ROWS rows by V vectors of tokens (`rows_beside`), and
// of PANEL_TOKENS tokens by WIDE vectors of outputs, or by REST of them at a row's end.
#if defined(__AVX512F__)
constexpr int MOST_VECTORS = 4;
constexpr int WIDE = 6;
constexpr int REST = 2;
constexpr int rows_beside(int vectors) { return vectors == 4 ? 6 : vectors == 3 ? 8 : 12; }
#else
constexpr int MOST_VECTORS = 2;
constexpr int WIDE = 3;
constexpr int REST = 1;
constexpr int rows_beside(int vectors) { return vectors == 2 ? 6 : 12; }
#endif
constexpr int PANEL_TOKENS = 4;
constexpr int SLICE = 320;  // units of rows and panels that stay in caches
constexpr int PANEL = MOST_VECTORS * LANES;  // tokens side by side, at most
constexpr int64_t TOGETHER = 256;  // tokens in panels that share weights in a cache

// --- units -----------------------------------------------------------------------------

// A number in all lanes.
inline Floats spread(const float* at) { return all(*at); }

inline Floats spread(const bf16* at) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Else GCC takes the way through a register of whole numbers.
  return (Floats)_mm256_slli_epi32(_mm256_set1_epi16(int16_t(at->bits)), 16);
#else
  return all(number(*at));
#endif
}

// One number, in float32.
template <typename T>
struct Unit {
  static constexpr int numbers = 1;
  typedef Floats type;  // one a lane

  static Ints read(const T* numbers) { return (Ints)load(numbers); }
  static Ints make(Floats first, Floats) { return (Ints)first; }
  static type all_lanes(const int32_t* unit) { return (Floats)(Ints{} + *unit); }
  static type all_lanes(const T* at) { return spread(at); }
  static Floats add(Floats sum, type a, type b) { return sum + a * b; }
  // W vectors of a unit's rows.
  template <int W>
  static void read_rows(const T* one, const T*, type* of_rows) {
    for (int w = 0; w < W; w++) of_rows[w] = load(one + w * LANES);
  }
};

#if defined(__AVX512BF16__)
// Two numbers, which one instruction multiplies and adds.
template <>
struct Unit<bf16> {
  static constexpr int numbers = 2;
  typedef __m512bh type;

  static Ints read(const bf16* numbers_there) {
    Ints units;
    std::memcpy(&units, numbers_there, sizeof units);
    return units;
  }
  static Ints make(Floats first, Floats second) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const __m256i of_first = _mm512_castsi512_si256(both);
    const __m256i of_second = _mm512_extracti64x4_epi64(both, 1);
    return (Ints)_mm512_cvtepu16_epi32(of_first) |
           ((Ints)_mm512_cvtepu16_epi32(of_second) << 16);
  }
  static type all_lanes(const int32_t* unit) { return (__m512bh)_mm512_set1_epi32(*unit); }
  static type all_lanes(const bf16* two) {
    int32_t unit;
    std::memcpy(&unit, two, sizeof unit);
    return all_lanes(&unit);
  }
  static Floats add(Floats sum, type a, type b) { return Pack<bf16>::add(sum, a, b); }
  // Two rows are woven into pairs, in the order of `place`.
  template <int W>
  static void read_rows(const bf16* one, const bf16* two, type* of_rows) {
    for (int w = 0; w < W; w += 2) {
      const __m512i first = _mm512_loadu_si512((const void*)(one + w * LANES));
      const __m512i second = _mm512_loadu_si512((const void*)(two + w * LANES));
      of_rows[w] = (__m512bh)_mm512_unpacklo_epi16(first, second);
      of_rows[w + 1] = (__m512bh)_mm512_unpackhi_epi16(first, second);
    }
  }
};
#endif

template <typename T>
inline typename Unit<T>::type read_units(const int32_t* units) {
  typename Unit<T>::type values;
  std::memcpy(&values, units, sizeof values);
  return values;
}

// --- panels ----------------------------------------------------------------------------

// LANES rows of LANES units become columns.
inline void transpose(Ints* rows) {
  for (int i = 0; i < LANES; i++)
    if (!(i & 1)) exchange<1>(rows[i], rows[i + 1]);
  for (int i = 0; i < LANES; i++)
    if (!(i & 2)) exchange<2>(rows[i], rows[i + 2]);
  for (int i = 0; i < LANES; i++)
    if (!(i & 4)) exchange<4>(rows[i], rows[i + 4]);
#if defined(__AVX512F__)
  for (int i = 0; i < 8; i++) exchange<8>(rows[i], rows[i + 8]);
#endif
}

// The tokens x of `lanes` lanes, side by side. `length` is a whole number of vectors.
template <typename T>
void fill_panel(const T* const* x, int lanes, int64_t length, int32_t* panel_UL) {
  constexpr int numbers = Unit<T>::numbers;
  for (int lane = 0; lane < lanes; lane += LANES)
    for (int64_t i = 0; i < length; i += LANES * numbers) {
      Ints units[LANES];
      for (int j = 0; j < LANES; j++) units[j] = Unit<T>::read(x[lane + j] + i);
      transpose(units);
      int32_t* to = panel_UL + i / numbers * lanes + lane;
      for (int j = 0; j < LANES; j++)
        std::memcpy(to + j * lanes, units + j, sizeof units[j]);
    }
}

struct Pair {  // a token and one of its experts
  int32_t token;
  float gate;
};

// One expert: rows of its matrices, W_down's neuron by neuron.
template <typename T>
struct Expert {
  const T* gate_MD;  // null in an FFN without a gate
  const T* up_MD;
  const T* down_MD;
  int64_t used;  // neurons that are not there to fill up
};

// Neurons [from, to) of an expert, for its tokens.
template <typename T>
struct Share {
  Expert<T> expert;
  int64_t from, to;
  const Pair* pairs;
  int64_t tokens;  // pairs: a token may be there twice
};

// Some tokens of one expert, side by side.
template <typename T>
struct Panels {
  int count = 0;  // panels
  int of_tokens = 0;
  int64_t units = 0;  // of a token
  Lines<int32_t> x_UL;
  Lines<float> nobody;  // y of lanes without a token
  float gate_L[TOGETHER];
  float* y_L[TOGETHER];

  void fill(const T* x_TD, int64_t D, const Pair* pairs, int tokens_there, float* y_TD) {
    of_tokens = tokens_there;
    count = (of_tokens + PANEL - 1) / PANEL;
    units = D / Unit<T>::numbers;
    x_UL.resize(units * TOGETHER);
    nobody.resize(D);
    const T* x_L[TOGETHER];
    for (int t = 0; t < TOGETHER; t++) {
      const bool is_there = t < of_tokens;
      const Pair& pair = pairs[is_there ? t : of_tokens - 1];
      x_L[t] = x_TD + pair.token * D;
      y_L[t] = is_there ? y_TD + pair.token * D : nobody.data();
      gate_L[t] = is_there ? pair.gate : 0;
    }
    for (int p = 0; p < count; p++)
      fill_panel(x_L + p * PANEL, vectors(p) * LANES, D, x_UL.data() + p * PANEL * units);
  }

  int tokens(int p) const { return std::min(PANEL, of_tokens - p * PANEL); }
  int vectors(int p) const { return (tokens(p) + LANES - 1) / LANES; }
  const int32_t* x(int p) const { return x_UL.data() + p * PANEL * units; }
  float* const* y(int p) const { return y_L + p * PANEL; }

  // Calls `run` with a panel's number of vectors as a constant.
  template <typename F>
  void with_vectors(int p, F run) const {
    switch (vectors(p)) {
#if defined(__AVX512F__)
      case 4: return run(std::integral_constant<int, 4>());
      case 3: return run(std::integral_constant<int, 3>());
#endif
      case 2: return run(std::integral_constant<int, 2>());
      case 1: return run(std::integral_constant<int, 1>());
    }
  }
};

// products[r * PANEL + lane] = row r . the token of that lane, over `units`; added to what
// is there unless these are the first. Rows are numbers, or units that were copied, so many
// `apart`. V vectors make a panel.
template <int ROWS, int V, typename T, typename R>
ALONE void panel_dots(const R* rows, int64_t apart, const int32_t* panel_UL, int64_t units,
                      bool are_first, float* products) {
  typedef Unit<T> U;
  constexpr int numbers = std::is_same<R, T>::value ? U::numbers : 1;
  const R* row[ROWS];
  for (int r = 0; r < ROWS; r++) row[r] = rows + r * apart;
  Floats sums[ROWS * V] = {};
  if (!are_first)
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < V; v++) sums[r * V + v] = load(products + r * PANEL + v * LANES);
  for (int64_t i = 0; i < units * numbers; i += numbers) {
    typename U::type of_tokens[V];
    for (int v = 0; v < V; v++) of_tokens[v] = read_units<T>(panel_UL + v * LANES);
    for (int r = 0; r < ROWS; r++) {
      const typename U::type of_row = U::all_lanes(row[r] + i);
      for (int v = 0; v < V; v++)
        sums[r * V + v] = U::add(sums[r * V + v], of_row, of_tokens[v]);
    }
    panel_UL += V * LANES;
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < V; v++) store(products + r * PANEL + v * LANES, sums[r * V + v]);
}

// W vectors of numbers of one unit of rows: from the rows, or from units that were copied.
template <int W, typename T>
inline void read_outputs(const T* rows, int64_t apart, bool has_second,
                         typename Unit<T>::type* of_rows) {
  // Where there is no second row, h has a zero.
  Unit<T>::template read_rows<W>(rows, has_second ? rows + apart : rows, of_rows);
}

template <int W, typename T>
inline void read_outputs(const int32_t* units, int64_t, bool,
                         typename Unit<T>::type* of_rows) {
  for (int w = 0; w < W; w++) of_rows[w] = read_units<T>(units + w * LANES);
}

// The same of `count` rows, one unit after the other.
template <int W, typename T>
inline void copy_outputs(const T* rows, int64_t apart, int count, int32_t* units_UW) {
  for (int r = 0; r < count; r += Unit<T>::numbers) {
    typename Unit<T>::type of_rows[W];
    read_outputs<W, T>(rows + r * apart, apart, r + 1 < count, of_rows);
    std::memcpy(units_UW, of_rows, sizeof of_rows);
    units_UW += W * LANES;
  }
}

// y of N tokens += h . `count` rows, for W vectors of numbers from `i` on. h_UL has a unit a
// line, PANEL lanes wide. Units of rows are so many `apart`.
template <int N, int W, typename T, typename R>
ALONE void panel_add(const R* rows, int64_t apart, int count, const int32_t* h_UL,
                     float* const* y, int64_t i) {
  typedef Unit<T> U;
  constexpr int numbers = std::is_same<R, T>::value ? U::numbers : 1;
  Floats sums[N * W] = {};
  for (int r = 0; r < count; r += U::numbers) {
    typename U::type of_rows[W];
    read_outputs<W, T>(rows, apart, r + 1 < count, of_rows);
    for (int t = 0; t < N; t++) {
      const typename U::type of_token = U::all_lanes(h_UL + t);
      for (int w = 0; w < W; w++)
        sums[t * W + w] = U::add(sums[t * W + w], of_token, of_rows[w]);
    }
    rows += numbers * apart;
    h_UL += PANEL;
  }
  for (int t = 0; t < N; t++)
    for (int w = 0; w < W; w++) {
      float* to = y[t] + i + w * LANES;
      store(to, load(to) + sums[t * W + w]);
    }
}

}  // namespace
