// Vectors of numbers, and the products of rows that all kernels are made of.
//
// Plain C++ with GCC's vectors, no library but OpenMP. Sums are in float32.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// Else every pointer of a tile is counted up in a register of its own, and sums leave
// theirs: a third slower.
#pragma GCC optimize("no-ivopts", "no-schedule-insns2")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // of a register
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
  uint16_t bits;
};

// Memory that begins with a line of the cache: else every second vector lies across two.
template <typename T>
struct LineAllocator {
  typedef T value_type;
  static constexpr std::align_val_t LINE{64};
  LineAllocator() = default;
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), LINE); }
  void deallocate(T* there, size_t) { ::operator delete(there, LINE); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};

template <typename T>
using Lines = std::vector<T, LineAllocator<T>>;

// Runs it, and says whether there was memory: an exception would end Python. (One of several
// threads still does; what they ask for is small.)
template <typename Work>
int32_t has_memory(const Work& work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

// --- numbers ---------------------------------------------------------------------------

// Less zero, for that is nothing to compute: plus zero changes -0.
inline Floats all(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats load(const bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

inline Floats load(const int8_t* from) {
#if defined(__AVX512BW__)
  const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#else
  Ints whole;
  for (int i = 0; i < LANES; i++) whole[i] = from[i];
  return __builtin_convertvector(whole, Floats);
#endif
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

inline float number(float value) { return value; }

inline float number(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void put(float* to, float value) { *to = value; }

inline void put(bf16* to, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) {
    to->bits = uint16_t(bits >> 16) | 64;  // stays no number
    return;
  }
  to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for an x between -87 and 88, and beyond them about what it is there: 2^n e^r with
// r = x - n ln 2, and a polynomial for e^r. Exact to 2e-7 of its value.
inline Floats exponential(Floats x) {
#if defined(__AVX512F__)
  // The second one is taken where x is not a number.
  x = (Floats)_mm512_max_ps((__m512)all(-87.3f), (__m512)x);
  x = (Floats)_mm512_min_ps((__m512)all(88.3f), (__m512)x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504f), 0);
#else
  x = x < all(-87.3f) ? all(-87.3f) : x;
  x = x > all(88.3f) ? all(88.3f) : x;
  const Floats scaled = x * 1.44269504f;
  const Floats half = scaled < all(0.0f) ? all(-0.5f) : all(0.5f);
  const Ints whole = __builtin_convertvector(scaled + half, Ints);
  const Floats n = __builtin_convertvector(whole, Floats);
#endif
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (Floats)((whole + 127) << 23);
#endif
}

// a / b for a b of at least 1. Division takes as long as half of what stands before it.
inline Floats quotient(Floats a, Floats b) {
#if defined(__AVX512F__)
  const Floats near = (Floats)_mm512_rcp14_ps((__m512)b);
  const Floats inverse = near * (2.0f - b * near);  // one step of Newton's
  return a * inverse;
#else
  return a / b;
#endif
}

enum Activation { SILU = 0, RELU = 1, GELU_TANH = 2 };

inline Floats activated(Floats x, int kind) {
  if (kind == RELU) return x < all(0.0f) ? all(0.0f) : x;  // NaN stays
  Floats z = x;
  if (kind == GELU_TANH) {
    // (1 + tanh u) / 2 is 1 / (1 + exp(-2 u)).
    z = (x + x * x * x * 0.044715f) * 1.5957691216f;
  }
  return quotient(x, 1.0f + exponential(-z));
}

// --- products of rows ------------------------------------------------------------------

template <typename T>
struct Pack {  // numbers that one instruction multiplies and adds
  typedef Floats type;
  static constexpr int size = LANES;
  static type read(const T* from) { return load(from); }
  static Floats add(Floats sum, type a, type b) { return sum + a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Pack<bf16> {
  typedef __m512bh type;
  static constexpr int size = 2 * LANES;
  static type read(const bf16* from) {
    return (type)_mm512_loadu_si512((const void*)from);
  }
  static Floats add(Floats sum, type a, type b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b);
  }
};
#endif

// Of both vectors the lanes whose number has no bit APART, and those whose number has it.
template <int APART>
inline void exchange(Ints& a, Ints& b) {
#if defined(__AVX512F__)
  constexpr Ints ones = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  constexpr Ints twos = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  constexpr Ints fours = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  constexpr Ints eights = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
#else
  constexpr Ints ones = {0, 8, 2, 10, 4, 12, 6, 14};
  constexpr Ints twos = {0, 1, 8, 9, 4, 5, 12, 13};
  constexpr Ints fours = {0, 1, 2, 3, 8, 9, 10, 11};
  constexpr Ints eights = {};
#endif
  static_assert(APART < LANES, "lanes of one vector");
  constexpr Ints without = APART == 1 ? ones : APART == 2 ? twos : APART == 4 ? fours : eights;
  const Ints low = __builtin_shuffle(a, b, without);
  const Ints high = __builtin_shuffle(a, b, without + APART);
  a = low;
  b = high;
}

template <int APART>
inline Floats sum_exchanged(Floats a, Floats b) {
  Ints low = (Ints)a;
  Ints high = (Ints)b;
  exchange<APART>(low, high);
  return (Floats)low + (Floats)high;
}

// The sum of the lanes of as many vectors as one has lanes, one a lane.
inline Floats totals(const Floats* v) {
  Floats two[LANES / 2], four[LANES / 4];
  for (int i = 0; i < LANES / 2; i++) two[i] = sum_exchanged<1>(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < LANES / 4; i++) four[i] = sum_exchanged<2>(two[2 * i], two[2 * i + 1]);
#if defined(__AVX512F__)
  const Floats first = sum_exchanged<4>(four[0], four[1]);
  const Floats second = sum_exchanged<4>(four[2], four[3]);
  return sum_exchanged<8>(first, second);
#else
  return sum_exchanged<4>(four[0], four[1]);
#endif
}

// products[r * N + t] = row r . x of token t, over `length` numbers.
template <int ROWS, int N, typename T>
inline void dots(const T* const* rows, const T* const* x, int64_t length, float* products) {
  typedef Pack<T> P;
  constexpr int COUNT = (ROWS * N + LANES - 1) / LANES * LANES;
  Floats sums[ROWS * N] = {};
  int64_t i = 0;
  for (; i + P::size <= length; i += P::size) {
    typename P::type of_token[N];
    for (int t = 0; t < N; t++) of_token[t] = P::read(x[t] + i);
    for (int r = 0; r < ROWS; r++) {
      typename P::type row = P::read(rows[r] + i);
      for (int t = 0; t < N; t++)
        sums[r * N + t] = P::add(sums[r * N + t], row, of_token[t]);
    }
  }
  for (int c = 0; c < COUNT; c += LANES) {
    Floats together[LANES] = {};
    for (int j = 0; j < LANES && c + j < ROWS * N; j++) together[j] = sums[c + j];
    store(products + c, totals(together));
  }
  for (; i < length; i++)
    for (int r = 0; r < ROWS; r++)
      for (int t = 0; t < N; t++)
        products[r * N + t] += number(rows[r][i]) * number(x[t][i]);
}

// y of every token += h[n][t] * row n, for numbers [i, end) of ROWS rows.
template <int ROWS, int N, typename T>
inline void add_rows(const T* const* rows, int64_t i, int64_t end, const float* h,
                     float* const* y) {
  for (; i + LANES <= end; i += LANES) {
    Floats row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = load(rows[r] + i);
    for (int t = 0; t < N; t++) {
      Floats sum = load(y[t] + i);
      for (int r = 0; r < ROWS; r++) sum += row[r] * h[r * N + t];
      store(y[t] + i, sum);
    }
  }
  for (; i < end; i++)
    for (int t = 0; t < N; t++)
      for (int r = 0; r < ROWS; r++) y[t][i] += h[r * N + t] * number(rows[r][i]);
}

#if defined(__AVX512BF16__)
// Two rows are woven into pairs, which one instruction multiplies and adds. Weaving
// leaves numbers 0 to 3, 8 to 11 and so on in one vector, the others in the next; y is
// kept in that order (`place`) until the end.
template <int ROWS, int N>
inline void add_rows(const bf16* const* rows, int64_t i, int64_t end, const float* h,
                     float* const* y) {
  constexpr int PAIRS = ROWS / 2;
  typedef Pack<bf16> P;
  __m512i pairs[N][PAIRS];
  for (int t = 0; t < N; t++)
    for (int p = 0; p < PAIRS; p++) {
      bf16 two[2];
      put(two, h[2 * p * N + t]);
      put(two + 1, h[(2 * p + 1) * N + t]);
      uint32_t both;
      std::memcpy(&both, two, sizeof both);
      pairs[t][p] = _mm512_set1_epi32(int(both));
    }
  for (; i + 2 * LANES <= end; i += 2 * LANES) {
    __m512i row[ROWS], low[PAIRS], high[PAIRS];
    for (int r = 0; r < ROWS; r++)
      row[r] = _mm512_loadu_si512((const void*)(rows[r] + i));
    for (int p = 0; p < PAIRS; p++) {
      low[p] = _mm512_unpacklo_epi16(row[2 * p], row[2 * p + 1]);
      high[p] = _mm512_unpackhi_epi16(row[2 * p], row[2 * p + 1]);
    }
    for (int t = 0; t < N; t++) {
      Floats sum = load(y[t] + i);
      Floats more = load(y[t] + i + LANES);
      for (int p = 0; p < PAIRS; p++) {
        sum = P::add(sum, (__m512bh)low[p], (__m512bh)pairs[t][p]);
        more = P::add(more, (__m512bh)high[p], (__m512bh)pairs[t][p]);
      }
      store(y[t] + i, sum);
      store(y[t] + i + LANES, more);
    }
  }
  for (; i < end; i++)
    for (int t = 0; t < N; t++)
      for (int r = 0; r < ROWS; r++) y[t][i] += h[r * N + t] * number(rows[r][i]);
}
#endif

// Where number i of a row stands in y.
template <typename T>
inline int64_t place(int64_t i, int64_t length) {
  return i;
}

#if defined(__AVX512BF16__)
template <>
inline int64_t place<bf16>(int64_t i, int64_t length) {
  int64_t within = i % 32;
  int64_t start = i - within;
  if (start + 32 > length) return i;
  int64_t quad = within / 4;
  return start + (quad % 2) * 16 + (quad / 2) * 4 + within % 4;
}
#endif

// --- threads ---------------------------------------------------------------------------

// Numbers of y from `i` on, of all parts together.
inline Floats sum_of(const float* y, int parts, int64_t apart) {
  Floats sum = load(y);
  for (int p = 1; p < parts; p++) sum += load(y + p * apart);
  return sum;
}

template <typename T>
void write_rows(const float* y_TD, int64_t begin, int64_t end, int64_t D, int parts,
                int64_t apart, T* out_TD) {
  for (int64_t t = begin; t < end; t++) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    if constexpr (std::is_same<T, bf16>::value)
      for (; i + 2 * LANES <= D; i += 2 * LANES) {
        const float* y = y_TD + t * D + i;
        const Floats low = sum_of(y, parts, apart);
        const Floats high = sum_of(y + LANES, parts, apart);
        // As they were woven: four of these, four of those.
        constexpr __m512i fours = {0, 4, 1, 5, 2, 6, 3, 7};
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        _mm512_storeu_si512(out_TD + t * D + i, _mm512_permutexvar_epi64(fours, both));
      }
#endif
    for (; i < D; i++) {
      const float* y = y_TD + t * D + place<T>(i, D);
      float sum = 0;
      for (int p = 0; p < parts; p++) sum += y[p * apart];
      put(out_TD + t * D + i, sum);
    }
  }
}

struct Part {  // that one thread does of something
  int64_t begin, end;
  Part(int64_t whole) {
    const int64_t mine = omp_get_thread_num();
    const int64_t threads = omp_get_num_threads();
    begin = whole * mine / threads;
    end = whole * (mine + 1) / threads;
  }
};

}  // namespace
