// Routed experts on a CPU: every chosen expert of every token, in one call.
//
//     y_t = sum over chosen e of gate_te * Down_e (act(Gate_e x_t) * (Up_e x_t))
//
// Built on first use (kernels/build.py); plain C++ with GCC's vectors, no library but
// OpenMP. Tokens are taken six at a time, so that a row of weights is read once for six,
// and neurons in groups that stay in the cache. Sums are in float32.
//
// Suffixes: T tokens, K experts of a token, R experts, M neurons of one as they are
// stored, D hidden size.

#if defined(__GNUC__) && !defined(__clang__)
// Else every pointer of a tile is counted up in a register of its own, and sums leave
// theirs: a third slower.
#pragma GCC optimize("no-ivopts", "no-schedule-insns2")
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int TOKENS = 6;         // that share a row of weights in registers
constexpr int GROUP = 32;           // neurons whose h are made before they are used
constexpr int64_t CHUNK = 512;     // of y that stays in the first cache meanwhile
constexpr int64_t CACHE = 400000;  // bytes of weights that stay in the second cache
constexpr int64_t MOST_SUMS = 1 << 24;  // that all threads together keep
constexpr int64_t SPLIT_TOKENS = 64;  // of each thread, from where threads share tokens out

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
  uint16_t bits;
};

// --- numbers ---------------------------------------------------------------------------

inline Floats all(float value) { return Floats{} + value; }

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

inline Floats exponential(Floats x) {
  // 2^n e^r with r = x - n ln 2, and a polynomial for e^r. Exact to 2e-7 of its value.
  x = x < all(-87.3f) ? all(-87.3f) : x;
  x = x > all(88.3f) ? all(88.3f) : x;
  Floats scaled = x * 1.44269504f;
  Floats half = scaled < all(0.0f) ? all(-0.5f) : all(0.5f);
  Ints n = __builtin_convertvector(scaled + half, Ints);
  Floats whole = __builtin_convertvector(n, Floats);
  Floats r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Floats)((n + 127) << 23);
}

enum Activation { SILU = 0, RELU = 1, GELU_TANH = 2 };

inline Floats activated(Floats x, int kind) {
  if (kind == RELU) return x > all(0.0f) ? x : all(0.0f);
  Floats z = x;
  if (kind == GELU_TANH) {
    // (1 + tanh u) / 2 is 1 / (1 + exp(-2 u)).
    z = (x + x * x * x * 0.044715f) * 1.5957691216f;
  }
  return x / (1.0f + exponential(-z));
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

// The sum of the lanes of sixteen vectors, one a lane.
inline Floats totals(const Floats* v) {
  constexpr Ints even = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
  constexpr Ints odd = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
  constexpr Ints even2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
  constexpr Ints odd2 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
  constexpr Ints even4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
  constexpr Ints odd4 = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};
  constexpr Ints low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
  constexpr Ints high = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};
  Floats two[8], four[4], eight[2];
  for (int i = 0; i < 8; i++)
    two[i] = __builtin_shuffle(v[2 * i], v[2 * i + 1], even) +
             __builtin_shuffle(v[2 * i], v[2 * i + 1], odd);
  for (int i = 0; i < 4; i++)
    four[i] = __builtin_shuffle(two[2 * i], two[2 * i + 1], even2) +
              __builtin_shuffle(two[2 * i], two[2 * i + 1], odd2);
  for (int i = 0; i < 2; i++)
    eight[i] = __builtin_shuffle(four[2 * i], four[2 * i + 1], even4) +
               __builtin_shuffle(four[2 * i], four[2 * i + 1], odd4);
  return __builtin_shuffle(eight[0], eight[1], low) +
         __builtin_shuffle(eight[0], eight[1], high);
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
    Floats sixteen[LANES] = {};
    for (int j = 0; j < LANES && c + j < ROWS * N; j++) sixteen[j] = sums[c + j];
    store(products + c, totals(sixteen));
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

// --- experts ---------------------------------------------------------------------------

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

template <typename T>
struct Experts {
  const T* x_TD;
  const T* first_RND;  // gate and up, or up alone
  const T* down_RMD;
  int64_t R, D, M, used;
  bool gated;
  int activation;
  Expert<T> shared;  // that every token runs; none where it has no neurons

  // The shared one comes last.
  int64_t count() const { return shared.used ? R + 1 : R; }

  Expert<T> of(int64_t expert) const {
    if (expert == R) return shared;
    const int64_t matrices = gated ? 2 : 1;
    const T* first_MD = first_RND + expert * matrices * M * D;
    const T* up_MD = first_MD + (gated ? M * D : 0);
    return {gated ? first_MD : nullptr, up_MD, down_RMD + expert * M * D, used};
  }

  // Neurons [from, to) of one expert, for N tokens.
  template <int N>
  void tile(const Expert<T>& expert, int64_t from, int64_t to, const Pair* pairs,
            float* y_TD) const {
    const T* x[N];
    float* y[N];
    for (int t = 0; t < N; t++) {
      x[t] = x_TD + pairs[t].token * D;
      y[t] = y_TD + pairs[t].token * D;
    }
    // One after the other, each with all of its tokens; a product of two writes beyond.
    float g[GROUP * N + 2 * LANES], h[GROUP * N + 2 * LANES], of_pair[N];
    for (int t = 0; t < N; t++) of_pair[t] = pairs[t].gate;
    for (int64_t start = from; start < to; start += GROUP) {
      const int count = int(std::min<int64_t>(GROUP, to - start));
      for (int m = 0; m < count; m += 2) {
        const int64_t one = start + m;
        const int64_t two = std::min(one + 1, to - 1);  // an odd last one is done twice
        float products[(4 * N + LANES - 1) / LANES * LANES];
        if (gated) {
          const T* rows[4] = {expert.gate_MD + one * D, expert.gate_MD + two * D,
                              expert.up_MD + one * D, expert.up_MD + two * D};
          dots<4, N>(rows, x, D, products);
          std::memcpy(g + m * N, products, 2 * N * sizeof(float));
          std::memcpy(h + m * N, products + 2 * N, 2 * N * sizeof(float));
        } else {
          const T* rows[2] = {expert.up_MD + one * D, expert.up_MD + two * D};
          dots<2, N>(rows, x, D, products);
          std::memcpy(h + m * N, products, 2 * N * sizeof(float));
        }
      }
      for (int i = 0; i < count * N; i += LANES) {
        Floats up = load(h + i);
        Floats made =
            gated ? activated(load(g + i), activation) * up : activated(up, activation);
        store(h + i, made);
      }
      for (int m = 0; m < count; m++)
        for (int t = 0; t < N; t++) h[m * N + t] *= of_pair[t];
      // Rows are taken eight and four at a time. Where that is more than there are, the
      // last one stands for the others too, and is multiplied with 0.
      std::memset(h + count * N, 0, (GROUP - count) * N * sizeof(float));
      const T* rows[GROUP];
      for (int m = 0; m < GROUP; m++)
        rows[m] = expert.down_MD + std::min(start + m, to - 1) * D;
      for (int64_t i = 0; i < D; i += CHUNK) {
        const int64_t chunk_end = std::min(i + CHUNK, D);
        int m = 0;
        for (; m + 8 <= count; m += 8) add_rows<8, N>(rows + m, i, chunk_end, h + m * N, y);
        for (; m < count; m += 4) add_rows<4, N>(rows + m, i, chunk_end, h + m * N, y);
      }
    }
  }

  // Neurons [from, to) of one expert, for all of its tokens.
  void run(int64_t number, int64_t from, int64_t to, const Pair* pairs, int64_t count,
           float* y_TD) const {
    const Expert<T> expert = of(number);
    const int64_t of_neuron = (gated ? 3 : 2) * D * int64_t(sizeof(T));
    const int64_t cached = std::max<int64_t>(GROUP, CACHE / of_neuron / GROUP * GROUP);
    for (int64_t start = from; start < to; start += cached) {
      const int64_t end = std::min(start + cached, to);
      int64_t done = 0;
      for (; done + TOKENS <= count; done += TOKENS)
        tile<TOKENS>(expert, start, end, pairs + done, y_TD);
      switch (count - done) {
        case 5: tile<5>(expert, start, end, pairs + done, y_TD); break;
        case 4: tile<4>(expert, start, end, pairs + done, y_TD); break;
        case 3: tile<3>(expert, start, end, pairs + done, y_TD); break;
        case 2: tile<2>(expert, start, end, pairs + done, y_TD); break;
        case 1: tile<1>(expert, start, end, pairs + done, y_TD); break;
      }
    }
  }
};

// The pairs of tokens [begin, end), expert after expert, those of the shared one last;
// where each expert's begin.
struct Sorted {
  std::vector<int64_t> starts;
  std::vector<Pair> pairs;

  Sorted(const int64_t* index_TK, const float* gate_TK, int64_t begin, int64_t end,
         int64_t K, int64_t R, bool shared)
      : starts(R + 2), pairs((end - begin) * (K + shared)) {
    // An index beyond the experts is nobody's.
    const auto known = [&](int64_t e) { return e >= 0 && e < R; };
    for (int64_t i = begin * K; i < end * K; i++)
      if (known(index_TK[i])) starts[index_TK[i] + 1]++;
    for (int64_t e = 0; e < R; e++) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts);
    for (int64_t t = begin; t < end; t++)
      for (int64_t k = 0; k < K; k++) {
        const int64_t e = index_TK[t * K + k];
        if (known(e)) pairs[next[e]++] = {int32_t(t), gate_TK[t * K + k]};
      }
    pairs.resize(starts[R] + (shared ? end - begin : 0));
    if (shared)
      for (int64_t t = begin; t < end; t++) pairs[starts[R] + t - begin] = {int32_t(t), 1.0f};
    starts[R + 1] = int64_t(pairs.size());
  }

  const Pair* of(int64_t expert) const { return pairs.data() + starts[expert]; }
  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

template <typename T>
void write_rows(const float* y_TD, int64_t begin, int64_t end, int64_t D, int parts,
                int64_t apart, T* out_TD) {
  for (int64_t t = begin; t < end; t++)
    for (int64_t i = 0; i < D; i++) {
      const float* from = y_TD + t * D + place<T>(i, D);
      float sum = 0;
      for (int p = 0; p < parts; p++) sum += from[p * apart];
      put(out_TD + t * D + i, sum);
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

// Every thread takes tokens of its own, with all of their experts.
template <typename T>
void by_tokens(const Experts<T>& experts, const int64_t* index_TK, const float* gate_TK,
               float* y_TD, T* out_TD, int64_t tokens, int64_t K, int threads) {
  const int64_t D = experts.D;
#pragma omp parallel num_threads(threads)
  {
    const Part mine(tokens);
    const Sorted sorted(index_TK, gate_TK, mine.begin, mine.end, K, experts.R,
                        experts.shared.used > 0);
    std::fill(y_TD + mine.begin * D, y_TD + mine.end * D, 0.0f);
    for (int64_t e = 0; e < experts.count(); e++)
      experts.run(e, 0, experts.of(e).used, sorted.of(e), sorted.count(e), y_TD);
    write_rows(y_TD, mine.begin, mine.end, D, 1, 0, out_TD);
  }
}

// Every thread takes neurons of its own, for all tokens; the sums are added in the end.
template <typename T>
void by_neurons(const Experts<T>& experts, const int64_t* index_TK, const float* gate_TK,
                float* y_PTD, T* out_TD, int64_t tokens, int64_t K, int threads) {
  const int64_t D = experts.D;
  const int64_t count = experts.count();
  const Sorted sorted(index_TK, gate_TK, 0, tokens, K, experts.R, experts.shared.used > 0);
  // A neuron's rows are read once, and multiplied with once a token: to read them takes
  // as long as twelve products, or so.
  constexpr int64_t READ = 12;
  std::vector<int64_t> work(count + 1, 0);
  for (int64_t e = 0; e < count; e++) {
    const int64_t pairs = sorted.count(e);
    work[e + 1] = work[e] + (pairs ? (READ + pairs) * experts.of(e).used : 0);
  }
#pragma omp parallel num_threads(threads)
  {
    const Part mine(work[count]);
    float* y_TD = y_PTD + omp_get_thread_num() * tokens * D;
    std::fill(y_TD, y_TD + tokens * D, 0.0f);
    for (int64_t e = 0; e < count; e++) {
      if (work[e + 1] <= mine.begin || work[e] >= mine.end) continue;
      const int64_t of_neuron = READ + sorted.count(e);
      const int64_t before = mine.begin - work[e];
      const int64_t until = mine.end - work[e];
      const int64_t from = std::max<int64_t>(0, (before + of_neuron - 1) / of_neuron);
      const int64_t to =
          std::min<int64_t>(experts.of(e).used, (until + of_neuron - 1) / of_neuron);
      experts.run(e, from, to, sorted.of(e), sorted.count(e), y_TD);
    }
#pragma omp barrier
    const Part rows(tokens);
    write_rows(y_PTD, rows.begin, rows.end, D, omp_get_num_threads(), tokens * D, out_TD);
  }
}

template <typename T>
void run_experts(const Experts<T>& experts, const int64_t* index_TK, const float* gate_TK,
                 T* out_TD, int64_t tokens, int64_t K, int threads) {
  const bool many =
      tokens >= SPLIT_TOKENS * threads || tokens * experts.D * threads > MOST_SUMS;
  static thread_local std::vector<float> y;
  const size_t needed = tokens * experts.D * (many ? 1 : threads);
  if (y.size() < needed) y.resize(needed);
  auto way = many ? by_tokens<T> : by_neurons<T>;
  way(experts, index_TK, gate_TK, y.data(), out_TD, tokens, K, threads);
}

// --- the router ------------------------------------------------------------------------

// Scores of experts [from, to) for tokens [begin, end).
template <typename T>
void score(const T* x_TD, const T* router_RD, float* scores_TR, int64_t begin, int64_t end,
           int64_t from, int64_t to, int64_t R, int64_t D) {
  constexpr int N = 4;
  for (int64_t t = begin; t < end; t += N)
    for (int64_t e = from; e < to; e += N) {
      const T* rows[N];
      const T* x[N];
      for (int i = 0; i < N; i++) {
        rows[i] = router_RD + std::min(e + i, to - 1) * D;
        x[i] = x_TD + std::min(t + i, end - 1) * D;
      }
      float products[N * N];
      if (end - t > 1) {
        dots<N, N>(rows, x, D, products);
      } else {
        float alone[LANES];
        dots<N, 1>(rows, x, D, alone);
        for (int i = 0; i < N; i++) products[i * N] = alone[i];
      }
      for (int i = 0; i < N && t + i < end; i++)
        for (int j = 0; j < N && e + j < to; j++)
          scores_TR[(t + i) * R + e + j] = products[j * N + i];
    }
}

// The K experts of largest score + bias, the first of equal ones, and their gates
// 1 + softmax(scores) * scale.
void choose(const float* scores_R, const float* bias_R, const float* scale_R, bool scaled,
            int64_t R, int64_t K, std::vector<std::pair<float, int64_t>>& ranked,
            int64_t* index_K, float* gate_K) {
  ranked.resize(R);
  for (int64_t e = 0; e < R; e++) {
    const float value = scores_R[e] + bias_R[e];
    // What is no number is not in any order, and comes last.
    ranked[e] = {value == value ? -value : INFINITY, e};
  }
  if (K < R) std::nth_element(ranked.begin(), ranked.begin() + K, ranked.end());
  float most = 0, sum = 1;
  if (scaled) {
    most = *std::max_element(scores_R, scores_R + R);
    sum = 0;
    for (int64_t e = 0; e < R; e++) sum += std::exp(scores_R[e] - most);
  }
  for (int64_t k = 0; k < K; k++) {
    const int64_t e = ranked[k].second;
    index_K[k] = e;
    gate_K[k] = scaled ? 1 + std::exp(scores_R[e] - most) / sum * scale_R[e] : 1.0f;
  }
}

template <typename T>
void route(const T* x_TD, const T* router_RD, const float* bias_R, const float* scale_R,
           int64_t* index_TK, float* gate_TK, int64_t tokens, int64_t K, int64_t R,
           int64_t D, int threads) {
  bool scaled = false;
  for (int64_t e = 0; e < R; e++) scaled = scaled || scale_R[e] != 0;
  static thread_local std::vector<float> kept;
  kept.resize(tokens * R);
  float* scores_TR = kept.data();
#pragma omp parallel num_threads(threads)
  {
    const Part rows(tokens);
    if (tokens >= 4 * omp_get_num_threads()) {
      score(x_TD, router_RD, scores_TR, rows.begin, rows.end, 0, R, R, D);
    } else {
      const Part experts(R);
      score(x_TD, router_RD, scores_TR, 0, tokens, experts.begin, experts.end, R, D);
    }
#pragma omp barrier
    std::vector<std::pair<float, int64_t>> ranked;
    for (int64_t t = rows.begin; t < rows.end; t++)
      choose(scores_TR + t * R, bias_R, scale_R, scaled, R, K, ranked, index_TK + t * K,
             gate_TK + t * K);
  }
}

// What Python hands over; an expert's matrices are laid out as transformers has them, but
// W_down, which is (R, M, D) in memory.
struct Call {
  const void* x_TD;
  void* out_TD;
  const void* first_RND;
  const void* down_RMD;
  const int64_t* index_TK;  // with gate_TK, where no router is given
  const float* gate_TK;
  const void* router_RD;
  const float* bias_R;
  const float* scale_R;
  const void* shared_gate_SD;
  const void* shared_up_SD;
  const void* shared_down_SD;
  int64_t tokens, K, R, M, used, D, S;
  int32_t gated, activation, threads;
};

template <typename T>
void run_call(const Call& call) {
  const Expert<T> shared{(const T*)call.shared_gate_SD, (const T*)call.shared_up_SD,
                         (const T*)call.shared_down_SD, call.S};
  const Experts<T> experts{(const T*)call.x_TD,
                           (const T*)call.first_RND,
                           (const T*)call.down_RMD,
                           call.R,
                           call.D,
                           call.M,
                           call.used,
                           call.gated != 0,
                           call.activation,
                           shared};
  const int64_t* index_TK = call.index_TK;
  const float* gate_TK = call.gate_TK;
  std::vector<int64_t> chosen;
  std::vector<float> gates;
  if (call.router_RD) {
    chosen.resize(call.tokens * call.K);
    gates.resize(call.tokens * call.K);
    route((const T*)call.x_TD, (const T*)call.router_RD, call.bias_R, call.scale_R,
          chosen.data(), gates.data(), call.tokens, call.K, call.R, call.D, call.threads);
    index_TK = chosen.data();
    gate_TK = gates.data();
  }
  run_experts(experts, index_TK, gate_TK, (T*)call.out_TD, call.tokens, call.K, call.threads);
}

}  // namespace

extern "C" void moesaic_experts_float32(const Call* call) { run_call<float>(*call); }
extern "C" void moesaic_experts_bfloat16(const Call* call) { run_call<bf16>(*call); }
