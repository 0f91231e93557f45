// Neurons on a CPU that are chosen one by one, in one call.
//
//     y_t = sum over n that run of h_tn w_n + b,   h = act(W_gate x) * (W_up x)
//
// Built on first use (kernels/build.py). Which neurons run is told by copies of W_gate and
// W_up in a few bits, all of which are read, or by W_gate itself. Of those that run, rows
// of the matrices are read: of W_down always, of the others where h is not the copies'.
// For few tokens: each reads rows of its own. With weights in 8 bits a row of W_gate or
// W_up is the copy's and what that leaves of it, in four bits more; those of W_down are
// whole numbers with scales.
//
// Suffixes: T tokens, D hidden size, F neurons, P bytes of a row of a copy's bit plane, G
// inputs that share a scale, groups of them.

#include <type_traits>

#include "vectors.h"

namespace {

constexpr int CHUNK = 64;        // neurons that are told of before those that run are read
constexpr int GROUP = 64;        // inputs of a copy that share a scale
constexpr int REST_BITS = 4;     // of what a copy leaves

// A matrix (F, D) in a few bits a weight, scale * (code - 2^(bits - 1)). Bit b of eight
// codes is a byte of plane b. Planes are so many bytes apart, and rows within one.
template <typename T>
struct Copy {
  const uint8_t* planes;
  const T* scales_FG;
  const T* bias_F;
  int64_t plane_step, row_step;

  const uint8_t* plane(int b, int64_t row) const {
    return planes + b * plane_step + row * row_step;
  }
};

// Eight bytes or the first few of them, and 0.
inline uint64_t first_bytes(const uint8_t* from, int64_t count) {
  uint64_t bits = 0;
  if (__builtin_expect(count == 8, 1))
    std::memcpy(&bits, from, 8);
  else
    std::memcpy(&bits, from, count);
  return bits;
}

#if defined(__AVX512VBMI__) && defined(__GFNI__)
// Where the bytes of two groups' planes, sixteen of each, have to stand so that each eight
// of them, turned as a matrix of bits, are eight codes: group k's, plane b in byte 7 - b.
struct Places {
  alignas(64) uint8_t of[2][GROUP];
  constexpr Places() : of() {
    for (int k = 0; k < 2; k++)
      for (int i = 0; i < GROUP; i++) of[k][i] = uint8_t((7 - i % 8) * 16 + 8 * k + i / 8);
  }
};
constexpr Places PLACES;

// The codes of two groups, a byte each, from `at` on in every plane.
template <int BITS>
inline void two_groups(const uint8_t* const* plane, int64_t at, __m512i* codes) {
  __m128i bytes[4] = {};
  for (int b = 0; b < BITS; b++) bytes[b] = _mm_loadu_si128((const __m128i*)(plane[b] + at));
  __m512i planes = _mm512_zextsi128_si512(bytes[0]);
  planes = _mm512_inserti32x4(planes, bytes[1], 1);
  if (BITS > 2) planes = _mm512_inserti32x4(planes, bytes[2], 2);
  if (BITS > 3) planes = _mm512_inserti32x4(planes, bytes[3], 3);
  const __mmask64 used = 0x0101010101010101ull * uint8_t(0xff << (8 - BITS));
  const __m512i each_bit = _mm512_set1_epi64(0x8040201008040201);
  for (int k = 0; k < 2; k++) {
    const __m512i places = _mm512_load_si512(PLACES.of[k]);
    const __m512i matrices = _mm512_maskz_permutexvar_epi8(used, places, planes);
    codes[k] = _mm512_gf2p8affine_epi64_epi8(each_bit, matrices, 0);
  }
}
#define TWO_GROUPS 1
#endif

// One group of a token's inputs times codes, from numbers laid out by `lay_out`.
template <typename T, int BITS>
struct Codes {
#if defined(__AVX512BW__)
  __m512i bytes;

  explicit Codes(__m512i codes) : bytes(codes) {}

  explicit Codes(const uint64_t* bits) {
    bytes = _mm512_maskz_set1_epi8(bits[0], 1);
    for (int b = 1; b < BITS; b++)
      bytes = _mm512_mask_add_epi8(bytes, bits[b], bytes, _mm512_set1_epi8(char(1 << b)));
  }

  Floats vector(int i) const {
    __m128i quarters[4];
    std::memcpy(quarters, &bytes, sizeof bytes);
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarters[i]));
  }

  Floats add(Floats sum, const float* x) const {
    for (int i = 0; i < GROUP / LANES; i++) sum += vector(i) * load(x + i * LANES);
    return sum;
  }

#if defined(__AVX512BF16__)
  // 128 + code is the code's bits behind those of 128. Even and odd bytes stand apart, as
  // does x.
  Floats add(Floats sum, const bf16* x) const {
    const __m512i base = _mm512_set1_epi16(0x4300);
    const __m512i low = _mm512_set1_epi16(0xff);
    const __m512i even = _mm512_ternarylogic_epi32(bytes, low, base, 0xea);  // a & b | c
    const __m512i odd = _mm512_or_si512(_mm512_srli_epi16(bytes, 8), base);
    typedef Pack<bf16> P;
    sum = P::add(sum, (__m512bh)even, P::read(x));
    return P::add(sum, (__m512bh)odd, P::read(x + P::size));
  }
#endif
#elif defined(__AVX2__) && !defined(__AVX512F__)
  alignas(32) uint8_t bytes[GROUP];

  // Each byte gets the byte of a plane that its bit is in, and then that bit.
  explicit Codes(const uint64_t* bits) {
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                              0x0303030303030303);
    const __m256i each_bit = _mm256_set1_epi64x(0x8040201008040201);
    for (int half = 0; half < 2; half++) {
      __m256i codes = _mm256_setzero_si256();
      for (int b = BITS - 1; b >= 0; b--) {
        int32_t half_of_plane;
        std::memcpy(&half_of_plane, (const char*)(bits + b) + 4 * half, 4);
        const __m256i plane = _mm256_set1_epi32(half_of_plane);
        const __m256i own_byte = _mm256_shuffle_epi8(plane, places);
        const __m256i own_bit = _mm256_and_si256(own_byte, each_bit);
        const __m256i is_set = _mm256_cmpeq_epi8(own_bit, each_bit);  // -1
        codes = _mm256_sub_epi8(_mm256_add_epi8(codes, codes), is_set);
      }
      _mm256_store_si256((__m256i*)(bytes + 32 * half), codes);
    }
  }

  Floats vector(int i) const {
    const __m128i eight = _mm_loadl_epi64((const __m128i*)(bytes + i * LANES));
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
  }

  Floats add(Floats sum, const float* x) const {
    for (int i = 0; i < GROUP / LANES; i++) sum += vector(i) * load(x + i * LANES);
    return sum;
  }
#else
  float codes[GROUP];

  explicit Codes(const uint64_t* bits) {
    for (int i = 0; i < GROUP; i++) {
      int code = 0;
      for (int b = 0; b < BITS; b++) code += int(bits[b] >> i & 1) << b;
      codes[i] = float(code);
    }
  }

  Floats vector(int i) const { return load(codes + i * LANES); }

  Floats add(Floats sum, const float* x) const {
    for (int i = 0; i < GROUP / LANES; i++) sum += vector(i) * load(x + i * LANES);
    return sum;
  }
#endif
};

#if defined(__AVX512BW__) && defined(__AVX512BF16__)
template <typename T>
using Laid = T;  // numbers that codes are multiplied with
constexpr float BASE[2] = {0, 128};  // what stands before codes in float32 and in bfloat16
#else
template <typename T>
using Laid = float;
constexpr float BASE[2] = {0, 0};
#endif

inline void lay(float* to, float value, int64_t i) { to[i] = value; }

// Of a group's numbers those at even places first.
inline void lay(bf16* to, float value, int64_t i) {
  const int64_t within = i % GROUP;
  put(to + (i - within) + within % 2 * (GROUP / 2) + within / 2, value);
}

// Tokens as codes are multiplied with them, and the sum of each group.
template <typename T>
struct Inputs {
  int64_t groups, lanes;  // and as many of them as fill vectors
  std::vector<Laid<T>> x_TG;
  std::vector<float> sum_TG;

  Inputs(const T* x_TD, int64_t tokens, int64_t D)
      : groups((D + GROUP - 1) / GROUP),
        lanes((groups + LANES - 1) / LANES * LANES),
        x_TG(tokens * groups * GROUP),
        sum_TG(tokens * lanes) {
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t i = 0; i < D; i++) {
        const float value = number(x_TD[t * D + i]);
        lay(x_TG.data() + t * groups * GROUP, value, i);
        sum_TG[t * lanes + i / GROUP] += value;
      }
  }

  const Laid<T>* x(int64_t t, int64_t group) const {
    return x_TG.data() + (t * groups + group) * GROUP;
  }
  // What 2^(bits - 1), and what stands before codes, takes off LANES groups.
  Floats off(int64_t t, int64_t group, int bits) const {
    const float base = BASE[std::is_same<T, bf16>::value];
    return load(sum_TG.data() + t * lanes + group) * -(base + float(1 << (bits - 1)));
  }
};

// LANES numbers or the first few of them, and 0.
template <typename T>
inline Floats load_first(const T* from, int64_t count) {
  if (count >= LANES) return load(from);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 present = __mmask16((1u << count) - 1);
  if (sizeof(T) == sizeof(float)) return (Floats)_mm512_maskz_loadu_ps(present, from);
  const __m256i halves = _mm256_maskz_loadu_epi16(present, from);
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#else
  T values[LANES] = {};
  std::memcpy(values, from, count * sizeof(T));
  return load(values);
#endif
}

// The neurons of a chunk that run for one token.
struct Running {
  int count = 0;
  int exact = 0;            // those whose rows of W_gate and W_up are read as well
  int64_t neuron[CHUNK];
  float told[CHUNK + LANES];  // their h by the copies, or their gate
  float gate[CHUNK], up[CHUNK];  // by the copies, where weights are in 8 bits
  int exact_place[CHUNK + 2];

  void clear() { count = exact = 0; }
};

// y += h of ROWS neurons times their rows of whole numbers, which have a scale a group.
template <int ROWS, typename T>
inline void add_rows(const int8_t* const* rows, const T* const* scales, int64_t D,
                     const float* h, float* y_D) {
  for (int64_t from = 0; from < D; from += GROUP) {
    const int64_t end = std::min(from + GROUP, D);
    float scaled[ROWS];
    for (int r = 0; r < ROWS; r++) scaled[r] = h[r] * number(scales[r][from / GROUP]);
    int64_t i = from;
    for (; i + LANES <= end; i += LANES) {
      Floats sum = load(y_D + i);
      for (int r = 0; r < ROWS; r++) sum += load(rows[r] + i) * scaled[r];
      store(y_D + i, sum);
    }
    for (; i < end; i++)
      for (int r = 0; r < ROWS; r++) y_D[i] += scaled[r] * rows[r][i];
  }
}

// W is what a row of W_down is made of: T, or int8_t with weights in 8 bits.
template <typename T, typename W>
struct Neurons {
  static constexpr bool EIGHT_BITS = std::is_same<W, int8_t>::value;
  // Bytes at the start of a row; the processor goes on.
  static constexpr int PREFETCHED = EIGHT_BITS ? 512 : 256;

  const T* x_TD;
  const T* gate_FD;
  const T* up_FD;
  const W* down_FD;
  const T* down_scales_FG;
  const T* gate_bias_F;
  const T* up_bias_F;
  Copy<T> gate_copy, up_copy;  // none: W_gate itself tells
  Copy<T> gate_rest, up_rest;  // what they leave, with weights in 8 bits
  const float* bias_F;         // a neuron runs where log told^2 + bias is above 0
  float margin;                // and is exact where it is above this
  int64_t D, F;
  int activation;

  bool by_gates() const { return gate_copy.planes == nullptr; }

  // Sums of one row of a copy times N tokens from `token` on, not yet added up over the
  // lanes.
  template <int BITS, int N>
  void row_of(const Copy<T>& copy, int64_t row, const Inputs<T>& inputs, Floats* sums,
              int64_t token = 0) const {
    const int64_t row_bytes = (D + 7) / 8;
    const int64_t whole = D / GROUP;
    const uint8_t* plane[BITS];
    for (int b = 0; b < BITS; b++) plane[b] = copy.plane(b, row);
    const T* scales_G = copy.scales_FG + row * inputs.groups;
    Floats sum[N] = {};
    for (int64_t first = 0; first < inputs.groups; first += LANES) {
      const int64_t count = std::min<int64_t>(LANES, inputs.groups - first);
      const Floats scales = load_first(scales_G + first, count);
      float scale[LANES];
      store(scale, scales);
      for (int t = 0; t < N; t++) sum[t] += scales * inputs.off(token + t, first, BITS);
      const int64_t last = std::min(first + count, whole);
      int64_t g = first;
#if defined(TWO_GROUPS)
      for (; g + 2 <= last; g += 2) {
        __m512i two[2];
        two_groups<BITS>(plane, 8 * g, two);
        for (int k = 0; k < 2; k++) {
          const Codes<T, BITS> codes(two[k]);
          for (int t = 0; t < N; t++)
            sum[t] += codes.add(Floats{}, inputs.x(token + t, g + k)) * scale[g + k - first];
        }
      }
#endif
      for (; g < last; g++) {
        uint64_t bits[BITS];
        for (int b = 0; b < BITS; b++) std::memcpy(bits + b, plane[b] + 8 * g, 8);
        const Codes<T, BITS> codes(bits);
        for (int t = 0; t < N; t++)
          sum[t] += codes.add(Floats{}, inputs.x(token + t, g)) * scale[g - first];
      }
      if (last == first + count) continue;
      uint64_t bits[BITS];  // of the last group, which is not whole
      for (int b = 0; b < BITS; b++)
        bits[b] = first_bytes(plane[b] + 8 * last, row_bytes - 8 * last);
      const Codes<T, BITS> codes(bits);
      for (int t = 0; t < N; t++)
        sum[t] += codes.add(Floats{}, inputs.x(token + t, last)) * scale[last - first];
    }
    for (int t = 0; t < N; t++) sums[t] = sum[t];
  }

  // Of LANES neurons or fewer, for N tokens, (N, LANES): h, or their gate where that tells.
  template <int N>
  struct Told {
    float h[N * LANES], gate[N * LANES], up[N * LANES];
  };

  // h of LANES neurons or fewer by their copies.
  template <int BITS, int N>
  void told_by_copies(int64_t from, int count, const Inputs<T>& inputs, Told<N>& told) const {
    Floats gate[N][LANES] = {}, up[N][LANES] = {};
    for (int i = 0; i < count; i++) {
      Floats sums[N];
      row_of<BITS, N>(gate_copy, from + i, inputs, sums);
      for (int t = 0; t < N; t++) gate[t][i] = sums[t];
      row_of<BITS, N>(up_copy, from + i, inputs, sums);
      for (int t = 0; t < N; t++) up[t][i] = sums[t];
    }
    const Floats gate_bias = some(gate_copy.bias_F, from, count);
    const Floats up_bias = some(up_copy.bias_F, from, count);
    for (int t = 0; t < N; t++) {
      const Floats g = totals(gate[t]) + gate_bias;
      const Floats u = totals(up[t]) + up_bias;
      store(told.h + t * LANES, activated(g, activation) * u);
      if (EIGHT_BITS) {
        store(told.gate + t * LANES, g);
        store(told.up + t * LANES, u);
      }
    }
  }

  // act(W_gate x) of the same, by W_gate itself.
  template <int N>
  void told_by_gates(int64_t from, int count, Told<N>& told) const {
    const T* x[N];
    for (int t = 0; t < N; t++) x[t] = x_TD + t * D;
    float sums[N * LANES];
    for (int i = 0; i < LANES; i += 4) {
      const T* rows[4];
      for (int r = 0; r < 4; r++)
        rows[r] = gate_FD + (from + std::min(i + r, count - 1)) * D;
      float products[(4 * N + LANES - 1) / LANES * LANES];
      dots<4, N>(rows, x, D, products);
      for (int r = 0; r < 4; r++)
        for (int t = 0; t < N; t++) sums[t * LANES + i + r] = products[r * N + t];
    }
    const Floats bias = some(gate_bias_F, from, count);
    for (int t = 0; t < N; t++)
      store(told.h + t * LANES, activated(load(sums + t * LANES) + bias, activation));
  }

  // LANES numbers from a place of a vector, 0 beyond `count`, or where there is none.
  template <typename V>
  static Floats some(const V* vector, int64_t from, int count) {
    return vector ? load_first(vector + from, count) : Floats{};
  }

  template <int BITS, int N>
  void told(int64_t from, int count, const Inputs<T>& inputs, Told<N>& to) const {
    if (by_gates())
      told_by_gates<N>(from, count, to);
    else
      told_by_copies<BITS, N>(from, count, inputs, to);
  }

  // The energy that a neuron has to exceed. Below the log of the smallest, 1e-38, all do:
  // 0, since `exponential` ends a little above it.
  static Floats least_energy(Floats log) {
    return log < all(-87.498233f) ? Floats{} : exponential(log);
  }

  // Who of neurons [from, to) runs, for N tokens.
  template <int BITS, int N>
  void choose(int64_t from, int64_t to, const Inputs<T>& inputs, Running* running) const {
    for (int t = 0; t < N; t++) running[t].clear();
    for (int64_t start = from; start < to; start += LANES) {
      const int count = int(std::min<int64_t>(LANES, to - start));
      float least[LANES], least_exact[LANES];
      Told<N> of;
      told<BITS, N>(start, count, inputs, of);
      const Floats bias = some(bias_F, start, count);
      store(least, least_energy(-bias));
      store(least_exact, least_energy(all(margin) - bias));
      for (int t = 0; t < N; t++)
        for (int i = 0; i < count; i++) {
          const int place = t * LANES + i;
          const float value = of.h[place];
          const float energy = std::max(value * value, 1e-38f);
          if (!(energy > least[i])) continue;
          if (EIGHT_BITS) {
            running[t].gate[running[t].count] = of.gate[place];
            running[t].up[running[t].count] = of.up[place];
          }
          add(running[t], start + i, value, energy > least_exact[i]);
        }
    }
  }

  void add(Running& running, int64_t neuron, float value, bool is_exact) const {
    const int place = running.count++;
    running.neuron[place] = neuron;
    running.told[place] = value;
    ahead(down_FD + neuron * D);
    if (!is_exact) return;
    running.exact_place[running.exact++] = place;
    if (EIGHT_BITS) {
      ahead(gate_rest.plane(0, neuron), gate_rest.row_step);
      ahead(up_rest.plane(0, neuron), up_rest.row_step);
      return;
    }
    ahead(up_FD + neuron * D);
    if (!by_gates()) ahead(gate_FD + neuron * D);
  }

  template <typename V>
  void ahead(const V* row, int64_t bytes = PREFETCHED) const {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)row + i);
  }

  // y += h of the neurons that run, times their rows of W_down.
  void run(Running& running, int64_t t, const Inputs<T>& inputs, float* y_D) const {
    if (running.count == 0) return;
    if (running.exact > 0) {
      if (EIGHT_BITS)
        add_rests(running, t, inputs);
      else
        make_exact(running, x_TD + t * D);
    }
    // Rows are taken eight and four at a time; the last one stands for those that there
    // are not, and is multiplied with 0.
    const W* rows[CHUNK + 8];
    const T* scales[CHUNK + 8];
    float* h = running.told;
    for (int i = 0; i < CHUNK + 8; i++) {
      const int64_t neuron = running.neuron[std::min(i, running.count - 1)];
      rows[i] = down_FD + neuron * D;
      if (EIGHT_BITS) scales[i] = down_scales_FG + neuron * inputs.groups;
    }
    for (int i = 0; i < 4; i++) h[running.count + i] = 0;
    int i = 0;
    if constexpr (EIGHT_BITS) {
      for (; i + 8 <= running.count; i += 8) add_rows<8>(rows + i, scales + i, D, h + i, y_D);
      for (; i < running.count; i += 4) add_rows<4>(rows + i, scales + i, D, h + i, y_D);
    } else {
      for (; i + 8 <= running.count; i += 8) add_rows<8, 1>(rows + i, 0, D, h + i, &y_D);
      for (; i < running.count; i += 4) add_rows<4, 1>(rows + i, 0, D, h + i, &y_D);
    }
  }

  // h of those that are exact: what the copies say, and what they leave. Half a vector of them at a time.
  void add_rests(Running& running, int64_t t, const Inputs<T>& inputs) const {
    constexpr int HALF = LANES / 2;
    for (int start = 0; start < running.exact; start += HALF) {
      const int count = std::min(HALF, running.exact - start);
      Floats rests[LANES] = {};
      float of_copies[LANES] = {}, sums[LANES], gates[LANES];
      for (int i = 0; i < count; i++) {
        const int place = running.exact_place[start + i];
        const int64_t neuron = running.neuron[place];
        row_of<REST_BITS, 1>(gate_rest, neuron, inputs, rests + i, t);
        row_of<REST_BITS, 1>(up_rest, neuron, inputs, rests + HALF + i, t);
        of_copies[i] = running.gate[place];
        of_copies[HALF + i] = running.up[place];
      }
      store(sums, totals(rests) + load(of_copies));
      store(gates, activated(load(sums), activation));
      for (int i = 0; i < count; i++)
        running.told[running.exact_place[start + i]] = gates[i] * sums[HALF + i];
    }
  }

  // h of those that are exact, two at a time.
  void make_exact(Running& running, const T* x_D) const {
    running.exact_place[running.exact] = running.exact_place[running.exact - 1];
    float gates[CHUNK + LANES], ups[CHUNK + LANES];
    for (int i = 0; i < running.exact; i += 2) {
      const T* rows[4];
      for (int r = 0; r < 2; r++) {
        const int64_t neuron = running.neuron[running.exact_place[i + r]];
        rows[r] = up_FD + neuron * D;
        rows[2 + r] = gate_FD + neuron * D;
      }
      float products[LANES];
      if (by_gates())
        dots<2, 1>(rows, &x_D, D, products);
      else
        dots<4, 1>(rows, &x_D, D, products);
      for (int r = 0; r < 2; r++) {
        const int place = running.exact_place[i + r];
        const int64_t neuron = running.neuron[place];
        ups[i + r] = products[r] + one(up_bias_F, neuron);
        gates[i + r] = by_gates() ? running.told[place] : products[2 + r] + one(gate_bias_F, neuron);
      }
    }
    for (int i = 0; i < running.exact; i += LANES) {
      const Floats gate = load(gates + i);
      store(gates + i, by_gates() ? gate : activated(gate, activation));
    }
    for (int i = 0; i < running.exact; i++)
      running.told[running.exact_place[i]] = gates[i] * ups[i];
  }

  static float one(const T* vector, int64_t place) {
    return vector ? number(vector[place]) : 0.0f;
  }

  // Chunks of neurons, each read while the next is being told of.
  template <int BITS, int N>
  void run_chunks(int64_t first, int64_t last, const Inputs<T>& inputs, float* y_TD) const {
    Running running[2][N];
    for (int64_t chunk = first; chunk <= last; chunk++) {
      const int64_t from = chunk * CHUNK;
      Running* now = running[chunk % 2];
      Running* before = running[(chunk + 1) % 2];
      if (chunk < last) choose<BITS, N>(from, std::min(from + CHUNK, F), inputs, now);
      if (chunk > first)
        for (int t = 0; t < N; t++) run(before[t], t, inputs, y_TD + t * D);
    }
  }
};

// What Python hands over beside the tokens.
struct Call {
  const void* gate_FD;
  const void* up_FD;
  const void* down_FD;
  const void* gate_bias_F;
  const void* up_bias_F;
  const void* down_bias_D;
  const uint8_t* gate_planes_BFP;
  const uint8_t* up_planes_BFP;
  const void* gate_scales_FG;
  const void* up_scales_FG;
  const void* gate_copy_bias_F;
  const void* up_copy_bias_F;
  const float* bias_F;
  const uint8_t* gate_rest_planes_FBP;
  const uint8_t* up_rest_planes_FBP;
  const void* gate_rest_scales_FG;
  const void* up_rest_scales_FG;
  const void* down_scales_FG;
  const float* margin;  // none where W_gate tells
  int64_t F, D;
  int32_t bits, activation;
};

// The tokens of a call.
template <typename T>
struct Tokens {
  const T* x_TD;
  T* out_TD;
  int64_t count;
  int threads;
};

// Numbers [begin, end) of what all threads have summed up, and the output's bias. Sums of
// rows of W lie as those are added.
template <typename T, typename W>
void write_sums(const float* y_PTD, int64_t begin, int64_t end, int64_t D, int parts,
                int64_t apart, const T* bias_D, T* out_TD) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t within = i % D;
    float sum = bias_D ? number(bias_D[within]) : 0.0f;
    const float* from = y_PTD + (i - within) + place<W>(within, D);
    for (int p = 0; p < parts; p++) sum += from[p * apart];
    put(out_TD + i, sum);
  }
}

template <typename T, typename W, int BITS, int N>
void run_tokens(const Neurons<T, W>& neurons, const T* down_bias_D, const Tokens<T>& tokens) {
  const int threads = tokens.threads;
  const int64_t D = neurons.D;
  const int64_t chunks = (neurons.F + CHUNK - 1) / CHUNK;
  const Inputs<T> inputs(neurons.x_TD, neurons.by_gates() ? 0 : N, D);
  static thread_local std::vector<float> kept;
  if (kept.size() < size_t(threads * N * D)) kept.resize(threads * N * D);
  float* y_PTD = kept.data();
#pragma omp parallel num_threads(threads)
  {
    const Part mine(chunks);
    float* y_TD = y_PTD + omp_get_thread_num() * N * D;
    std::fill(y_TD, y_TD + N * D, 0.0f);
    neurons.template run_chunks<BITS, N>(mine.begin, mine.end, inputs, y_TD);
#pragma omp barrier
    const Part numbers(N * D);
    write_sums<T, W>(y_PTD, numbers.begin, numbers.end, D, omp_get_num_threads(), N * D,
                     down_bias_D, tokens.out_TD);
  }
}

template <typename T, typename W, int BITS>
void run_bits(const Neurons<T, W>& neurons, const T* down_bias_D, const Tokens<T>& tokens) {
  switch (tokens.count) {
    case 1: return run_tokens<T, W, BITS, 1>(neurons, down_bias_D, tokens);
    case 2: return run_tokens<T, W, BITS, 2>(neurons, down_bias_D, tokens);
    case 3: return run_tokens<T, W, BITS, 3>(neurons, down_bias_D, tokens);
    case 4: return run_tokens<T, W, BITS, 4>(neurons, down_bias_D, tokens);
  }
}

template <typename T, typename W>
void run_neurons(const Call& call, const Tokens<T>& tokens) {
  const int64_t row_bytes = (call.D + 7) / 8;
  const int64_t plane_bytes = call.F * row_bytes;
  const Copy<T> gate_copy{call.gate_planes_BFP, (const T*)call.gate_scales_FG,
                          (const T*)call.gate_copy_bias_F, plane_bytes, row_bytes};
  const Copy<T> up_copy{call.up_planes_BFP, (const T*)call.up_scales_FG,
                        (const T*)call.up_copy_bias_F, plane_bytes, row_bytes};
  // Planes of a row side by side, since only some rows are read.
  const int64_t rest_bytes = REST_BITS * row_bytes;
  const Copy<T> gate_rest{call.gate_rest_planes_FBP, (const T*)call.gate_rest_scales_FG,
                          nullptr, row_bytes, rest_bytes};
  const Copy<T> up_rest{call.up_rest_planes_FBP, (const T*)call.up_rest_scales_FG, nullptr,
                        row_bytes, rest_bytes};
  const Neurons<T, W> neurons{tokens.x_TD,
                              (const T*)call.gate_FD,
                              (const T*)call.up_FD,
                              (const W*)call.down_FD,
                              (const T*)call.down_scales_FG,
                              (const T*)call.gate_bias_F,
                              (const T*)call.up_bias_F,
                              gate_copy,
                              up_copy,
                              gate_rest,
                              up_rest,
                              call.bias_F,
                              call.margin ? *call.margin : 0.0f,
                              call.D,
                              call.F,
                              call.activation};
  const T* down_bias_D = (const T*)call.down_bias_D;
  switch (call.bits) {
    case 2: return run_bits<T, W, 2>(neurons, down_bias_D, tokens);
    case 3: return run_bits<T, W, 3>(neurons, down_bias_D, tokens);
    default: return run_bits<T, W, 4>(neurons, down_bias_D, tokens);
  }
}

template <typename T>
void run_call(const Call& call, const Tokens<T>& tokens) {
  if (call.down_scales_FG)
    run_neurons<T, int8_t>(call, tokens);
  else
    run_neurons<T, T>(call, tokens);
}

// The matrix that a copy stands for, rounded as (code - half) * scale is.
template <typename T, int BITS>
void write_copy(const Copy<T>& copy, T* out_FD, int64_t F, int64_t D, int threads) {
  const int64_t row_bytes = (D + 7) / 8;
  const int64_t groups = (D + GROUP - 1) / GROUP;
  const float half = float(1 << (BITS - 1));
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < F; row++)
    for (int64_t g = 0; g < groups; g++) {
      uint64_t bits[BITS];
      for (int b = 0; b < BITS; b++) {
        bits[b] = first_bytes(copy.plane(b, row) + 8 * g, std::min<int64_t>(8, row_bytes - 8 * g));
      }
      const Codes<T, BITS> codes(bits);
      float values[GROUP];
      const float scale = number(copy.scales_FG[row * groups + g]);
      for (int i = 0; i < GROUP / LANES; i++) store(values + i * LANES, (codes.vector(i) - half) * scale);
      T* to = out_FD + row * D + g * GROUP;
      const int64_t count = std::min<int64_t>(GROUP, D - g * GROUP);
      for (int64_t i = 0; i < count; i++) put(to + i, values[i]);
    }
}

template <typename T>
void write_copy_of(const void* planes, const void* scales, void* out, int64_t plane_step,
                   int64_t row_step, int64_t F, int64_t D, int bits, int threads) {
  const Copy<T> copy{(const uint8_t*)planes, (const T*)scales, nullptr, plane_step, row_step};
  switch (bits) {
    case 2: return write_copy<T, 2>(copy, (T*)out, F, D, threads);
    case 3: return write_copy<T, 3>(copy, (T*)out, F, D, threads);
    default: return write_copy<T, 4>(copy, (T*)out, F, D, threads);
  }
}

}  // namespace

extern "C" void moesaic_copy_float32(const void* planes, const void* scales, void* out,
    int64_t plane_step, int64_t row_step, int64_t F, int64_t D, int bits, int threads) {
  write_copy_of<float>(planes, scales, out, plane_step, row_step, F, D, bits, threads);
}

extern "C" void moesaic_copy_bfloat16(const void* planes, const void* scales, void* out,
    int64_t plane_step, int64_t row_step, int64_t F, int64_t D, int bits, int threads) {
  write_copy_of<bf16>(planes, scales, out, plane_step, row_step, F, D, bits, threads);
}

extern "C" int32_t moesaic_neurons_float32(const Call* call, const void* x_TD, void* out_TD,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_call<float>(*call, {(const float*)x_TD, (float*)out_TD, tokens, threads});
  });
}

extern "C" int32_t moesaic_neurons_bfloat16(const Call* call, const void* x_TD, void* out_TD,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_call<bf16>(*call, {(const bf16*)x_TD, (bf16*)out_TD, tokens, threads});
  });
}
