// Products of many tokens by tiles of 16 rows (Intel's AMX), in bfloat16.
//
// One instruction multiplies 16 rows of 32 numbers with 16 columns of 32 numbers. Weights
// are rows as they lie; tokens are packed as columns of pairs for each expert. h goes back
// as rows of tokens, and rows of W_down are woven into pairs.
//
// To pick the tokens of an expert and to add to their y takes longer than the products of
// a small expert. Where most tokens run such experts, all tokens do, with zero as gate of
// those that should not: their columns are packed once, and sums stay in registers. Of an
// expert whose W_down is no number these tokens then get no number either.
//
// Suffixes: U units (pairs of bfloat16), L lanes (tokens side by side), T tokens.

#pragma once

#include "panels.h"

#if !defined(__AMX_BF16__) || !defined(__AMX_TILE__) || !defined(__AVX512BF16__) || \
    !defined(__linux__)

namespace {
struct TileRegisters {};
inline bool tiles_are_there() { return false; }
}  // namespace

#else

#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE = 16;  // rows of a tile, and columns of a product
constexpr int DEEP = 32;  // numbers of a row of a tile
constexpr int LINE = 2 * TILE;             // numbers of a line of products
constexpr int64_t X_NUMBERS = 3 << 18;     // of tokens that share weights in a cache
constexpr int64_t X_BESIDE_ROWS = 1 << 19;  // of tokens beside which the next rows stay too
constexpr int64_t Y_NUMBERS = 1 << 18;     // of y that stay in the second cache
constexpr int64_t MOST_UNITS = 256;        // pairs of rows of W_down that are woven at once
constexpr int64_t MOST_OUTPUTS = 1024;     // numbers of such rows
constexpr int64_t FEW_TILED = 32;          // tokens for which whole rows are woven
constexpr int64_t WOVEN = 1 << 17;         // units that are woven then

// Whether Linux lets this process use the registers of tiles, which it has to be asked for.
inline bool tiles_are_there() {
  constexpr int REQUEST = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int TILE_DATA = 18;    // XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

// The registers of this thread, as eight tiles of 16 rows of 64 bytes.
struct TileRegisters {
  TileRegisters() {
    if (!tiles_are_there()) return;
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    // Not on the stack: GCC 12 believes that eight bytes of it are read.
    static const Shapes shapes;
    _tile_loadconfig(&shapes);
  }
  ~TileRegisters() {
    if (tiles_are_there()) _tile_release();
  }
};

// --- columns ---------------------------------------------------------------------------

// Four rows of four units become columns, in each quarter of a register by itself.
inline void transpose_quarters(__m512i* rows) {
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
  const __m512i b = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  rows[0] = _mm512_unpacklo_epi64(a, c);
  rows[1] = _mm512_unpackhi_epi64(a, c);
  rows[2] = _mm512_unpacklo_epi64(b, d);
  rows[3] = _mm512_unpackhi_epi64(b, d);
}

// Column u of 16 rows of 16 units goes to line u. Quarters of four rows are put together
// as they are read, which costs no shuffle.
template <typename RowOf>
inline void columns_of(RowOf row_of, int32_t* to_UL) {
  for (int quarter = 0; quarter < 4; quarter++) {
    __m512i rows[4];
    for (int j = 0; j < 4; j++) {
      const auto part = [&](int i) {
        return _mm_loadu_si128((const __m128i*)(row_of(j + 4 * i) + 4 * quarter));
      };
      __m512i together = _mm512_castsi128_si512(part(0));
      together = _mm512_mask_broadcast_i32x4(together, 0x00f0, part(1));
      together = _mm512_mask_broadcast_i32x4(together, 0x0f00, part(2));
      together = _mm512_mask_broadcast_i32x4(together, 0xf000, part(3));
      rows[j] = together;
    }
    transpose_quarters(rows);
    for (int j = 0; j < 4; j++)
      _mm512_storeu_si512(to_UL + (4 * quarter + j) * TILE, rows[j]);
  }
}

// Rows of D numbers side by side: a line of 16 for every unit.
inline void fill_tile(const int32_t* const* x, int64_t D, int32_t* x_UL) {
  for (int64_t u = 0; u < D / 2; u += TILE)
    columns_of([&](int row) { return x[row] + u; }, x_UL + u * TILE);
}

// `count` rows and as many of zeros as make 16.
inline void fill_up(const bf16* from, int64_t count, int64_t D, bf16* to) {
  const int64_t there = std::clamp<int64_t>(count, 0, TILE);
  std::copy(from, from + there * D, to);
  std::fill(to + there * D, to + TILE * D, bf16{0});
}

// --- products --------------------------------------------------------------------------

inline void fetch_tile(const void* tile) {
  for (int line = 0; line < 16; line++) _mm_prefetch((const char*)tile + 64 * line, _MM_HINT_T0);
}

// Rows that are fetched from memory while others are multiplied with.
struct Ahead {
  const bf16* const* rows = nullptr;
  int64_t count = 0;

  void fetch(int64_t i) const {
    for (int64_t r = 0; r < count; r++) _mm_prefetch((const char*)(rows[r] + i), _MM_HINT_T1);
  }
};

// Products of twice 16 rows of D numbers with one or two tiles of tokens: those of the
// second rows below, those of the second tile beside.
template <int TILES>
ALONE void tile_dots(const bf16* first, const bf16* second, int64_t D, const int32_t* x_UL,
                     float* products, const Ahead& ahead = {}) {
  const int32_t* next_UL = x_UL + D / 2 * TILE;  // the other tile's
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < D; i += DEEP) {
    _tile_loadd(4, first + i, D * 2);
    _tile_loadd(6, x_UL, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second + i, D * 2);
    _tile_dpbf16ps(2, 5, 6);
    x_UL += TILE * TILE;
    fetch_tile(x_UL);
    if (TILES == 2) {
      _tile_loadd(7, next_UL, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      next_UL += TILE * TILE;
      fetch_tile(next_UL);
    }
    ahead.fetch(i);
  }
  _tile_stored(0, products, LINE * 4);
  _tile_stored(2, products + TILE * LINE, LINE * 4);
  if (TILES == 2) {
    _tile_stored(1, products + TILE, LINE * 4);
    _tile_stored(3, products + TILE * LINE + TILE, LINE * 4);
  }
}

// Adds to tiles 0 to 3 the products of one or two tiles of tokens with 32 outputs, over
// `steps` of 32 neurons.
template <int TILES>
inline void output_steps(const int32_t* h_TU, int64_t width, const int32_t* woven,
                         int64_t steps) {
  for (int64_t s = 0; s < steps; s++) {
    _tile_loadd(4, h_TU, width * 4);
    _tile_loadd(6, woven, LINE * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, woven + TILE, LINE * 4);
    _tile_dpbf16ps(1, 4, 7);
    if (TILES == 2) {
      _tile_loadd(5, h_TU + TILE * width, width * 4);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    h_TU += TILE;
    woven += TILE * LINE;
    fetch_tile(woven);
    fetch_tile(woven + TILE * TILE);
  }
}

// Those products alone.
template <int TILES>
ALONE void tile_outputs(const int32_t* h_TU, int64_t width, const int32_t* woven,
                        int64_t steps, float* products) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  output_steps<TILES>(h_TU, width, woven, steps);
  _tile_stored(0, products, LINE * 4);
  _tile_stored(1, products + TILE, LINE * 4);
  if (TILES == 2) {
    _tile_stored(2, products + TILE * LINE, LINE * 4);
    _tile_stored(3, products + TILE * LINE + TILE, LINE * 4);
  }
}

// y of one or two tiles of tokens, lines `y_width` apart, += their products with 32 outputs.
template <int TILES>
ALONE void tile_sums(const int32_t* h_TU, int64_t width, const int32_t* woven, int64_t steps,
                     float* y, int64_t y_width) {
  _tile_loadd(0, y, y_width * 4);
  _tile_loadd(1, y + TILE, y_width * 4);
  if (TILES == 2) {
    _tile_loadd(2, y + TILE * y_width, y_width * 4);
    _tile_loadd(3, y + TILE * y_width + TILE, y_width * 4);
  }
  output_steps<TILES>(h_TU, width, woven, steps);
  _tile_stored(0, y, y_width * 4);
  _tile_stored(1, y + TILE, y_width * 4);
  if (TILES == 2) {
    _tile_stored(2, y + TILE * y_width, y_width * 4);
    _tile_stored(3, y + TILE * y_width + TILE, y_width * 4);
  }
}

// --- the router ------------------------------------------------------------------------

// Scores of R experts for tokens [begin, end).
inline void score_tiles(const bf16* x_TD, const bf16* router_RD, float* scores_TR, int64_t begin,
                        int64_t end, int64_t R, int64_t D) {
  Lines<bf16> rows(2 * TILE * D);
  Lines<int32_t> x_UL(2 * TILE * D / 2);
  alignas(64) float products[2 * TILE * LINE];
  alignas(64) int32_t of_tokens[TILE * TILE];
  for (int64_t e = 0; e < R; e += 2 * TILE) {
    const bf16* first = router_RD + e * D;
    if (R - e < 2 * TILE) {
      fill_up(first, R - e, D, rows.data());
      fill_up(first + TILE * D, R - e - TILE, D, rows.data() + TILE * D);
      first = rows.data();
    }
    for (int64_t t = begin; t < end; t += 2 * TILE) {
      for (int tile = 0; tile < 2; tile++) {
        const int32_t* x[TILE];
        for (int j = 0; j < TILE; j++)
          x[j] = (const int32_t*)(x_TD + std::min(t + tile * TILE + j, end - 1) * D);
        fill_tile(x, D, x_UL.data() + tile * D / 2 * TILE);
      }
      tile_dots<2>(first, first + TILE * D, D, x_UL.data(), products);
      for (int part = 0; part < 4; part++) {
        const int64_t expert = e + part / 2 * TILE;
        const int64_t token = t + part % 2 * TILE;
        const float* made = products + part / 2 * TILE * LINE + part % 2 * TILE;
        columns_of([&](int row) { return (const int32_t*)made + row * LINE; }, of_tokens);
        const int64_t experts = std::clamp<int64_t>(R - expert, 0, TILE);
        for (int64_t j = 0; j < TILE && token + j < end; j++)
          std::memcpy(scores_TR + (token + j) * R + expert, of_tokens + j * TILE,
                      experts * sizeof(float));
      }
    }
  }
}

// --- experts ---------------------------------------------------------------------------

// One neuron: rows of its matrices, and the gate of each token that it is computed for.
struct Neuron {
  const bf16* up;
  const bf16* gate;  // null in an FFN without a gate
  const bf16* down;
  const float* gate_T;
};

// Neurons that are computed for the same tokens: those of one share for those that run it,
// or those of several shares for all, with zero as gate of those that do not.
struct Group {
  std::vector<Neuron> neurons;
  const Pair* pairs;  // null for all tokens, in order
  int64_t tokens;
  int64_t h_start;  // of its h

  int64_t count() const { return int64_t(neurons.size()); }
  int64_t steps() const { return (count() + DEEP - 1) / DEEP; }
  int64_t width() const { return steps() * TILE; }  // units of h of a token
  // A product takes two tiles of tokens, of which the last may not be there.
  int64_t lines() const { return (tokens + 2 * TILE - 1) / (2 * TILE) * (2 * TILE); }
};

// First h of all experts, then y: so that y of some outputs stays in a cache for all.
struct TiledExperts {
  const bf16* x_TD;
  float* y_TD;
  int64_t D;
  bool gated;
  int activation;
  int64_t first_token, all_tokens;
  int64_t most_units;  // pairs of rows of W_down that are woven at once

  // What a thread keeps.
  Lines<int32_t> x_UL;   // tile after tile, a line for every unit
  Lines<float> gate_GT;  // gates of one share after the other
  Lines<int32_t> h_TU;
  Lines<int32_t> woven;  // for every 32 outputs a line for every unit
  Lines<bf16> rows;      // that do not lie as tiles
  alignas(64) float products[2][2 * TILE * LINE];  // of now, and of the time before

  // y += what all shares give, for tokens [begin, end).
  void run(const std::vector<Share<bf16>>& shares, const bf16* x, int64_t hidden_size,
           int activated_by, float* y, int64_t begin, int64_t end) {
    x_TD = x;
    y_TD = y;
    D = hidden_size;
    gated = shares[0].expert.gate_MD != nullptr;
    activation = activated_by;
    first_token = begin;
    all_tokens = end - begin;
    const std::vector<Group> groups = grouped(shares);
    for (const Group& group : groups) make_all_h(group);
    // Few tokens wait for weights, which come fastest as whole rows.
    const bool are_few = all_tokens <= FEW_TILED;
    const int64_t fitting = std::max<int64_t>(2 * DEEP, Y_NUMBERS / all_tokens / DEEP * DEEP);
    const int64_t outputs = are_few ? D : std::min(MOST_OUTPUTS, fitting);
    most_units = are_few ? std::max<int64_t>(TILE, WOVEN / D / TILE * TILE) : MOST_UNITS;
    for (int64_t i = 0; i < D; i += outputs)
      for (const Group& group : groups)
        for (int64_t m = 0; m < group.count(); m += 2 * most_units)
          add_outputs(group, m, i, std::min(i + outputs, D));
  }

  template <typename N>
  static void grow(Lines<N>& kept, int64_t count) {
    if (int64_t(kept.size()) < count) kept.resize(count);
  }

  // Whether a share takes less time for all tokens than for its own. To pick tokens costs
  // their columns, and a sum for each and every output; tiles are filled up with zeros.
  // In cycles, as measured, for two tiles of tokens.
  bool pays_for_all(const Share<bf16>& share) const {
    if (share.tokens >= all_tokens) return true;
    const double rows = D / DEEP * 120 + 740;  // 16 neurons and their gates
    const double columns = D / DEEP * 150;
    const double neurons = double(share.to - share.from);
    const double tiles = std::ceil(neurons / TILE);
    const double steps = std::ceil(neurons / DEEP);
    const double picked = columns + tiles * rows + D / DEEP * (48 * steps + 300);
    const double all = neurons / TILE * rows + D / DEEP * 60 * neurons / DEEP;
    return share.tokens * picked > all_tokens * all;
  }

  // The group of all tokens, and one for each other share; makes room for their h.
  std::vector<Group> grouped(const std::vector<Share<bf16>>& shares) {
    const int64_t lines = (all_tokens + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
    grow(gate_GT, int64_t(shares.size()) * lines);
    std::vector<Group> groups(1, Group{{}, nullptr, all_tokens, 0});
    for (size_t s = 0; s < shares.size(); s++) {
      const Share<bf16>& share = shares[s];
      float* gate_T = gate_GT.data() + s * lines;
      std::fill(gate_T, gate_T + lines, 0.0f);
      const bool for_all = pays_for_all(share);
      for (int64_t t = 0; t < share.tokens; t++) {
        const Pair& pair = share.pairs[t];
        gate_T[for_all ? pair.token - first_token : t] += pair.gate;  // it may be there twice
      }
      if (!for_all) groups.push_back(Group{{}, share.pairs, share.tokens, 0});
      Group& group = for_all ? groups[0] : groups.back();
      for (int64_t m = share.from; m < share.to; m++) {
        const bf16* gate = gated ? share.expert.gate_MD + m * D : nullptr;
        const Expert<bf16>& expert = share.expert;
        group.neurons.push_back({expert.up_MD + m * D, gate, expert.down_MD + m * D, gate_T});
      }
    }
    int64_t units = 0;
    for (Group& group : groups) {
      group.h_start = units;
      units += group.lines() * group.width();
    }
    grow(h_TU, units);
    return groups;
  }

  void make_all_h(const Group& group) {
    const int64_t fitting = X_NUMBERS / D / (2 * TILE) * (2 * TILE);
    const int64_t together = std::max<int64_t>(2 * TILE, fitting);
    for (int64_t first = 0; first < group.tokens && group.count(); first += together) {
      const int64_t count = std::min(together, group.tokens - first);
      fill(group, first, count);
      const int beside = gated ? TILE : 2 * TILE;
      for (int64_t m = 0; m < 2 * group.width(); m += beside) make_h(group, m, first, count);
    }
  }

  // Tokens as tiles; those that are not there are the last one.
  void fill(const Group& group, int64_t first, int64_t count) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    grow(x_UL, tiles * TILE * D / 2);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int32_t* x[TILE];
      for (int j = 0; j < TILE; j++) {
        const int64_t number = first + std::min(tile * TILE + j, count - 1);
        const int64_t token = group.pairs ? group.pairs[number].token : first_token + number;
        x[j] = (const int32_t*)(x_TD + token * D);
      }
      fill_tile(x, D, x_UL.data() + tile * D / 2 * TILE);
    }
  }

  // 16 rows of a matrix from neuron `m` on: as they lie, or where they are not side by side
  // copies, with zeros for neurons beyond the last.
  const bf16* rows_of(const Group& group, int64_t m, const bf16* Neuron::*matrix, int64_t copy) {
    const auto row = [&](int64_t i) {
      return m + i < group.count() ? group.neurons[m + i].*matrix : nullptr;
    };
    bool are_beside = true;
    for (int i = 0; i < TILE; i++) are_beside = are_beside && row(i) && row(i) == row(0) + i * D;
    if (are_beside) return row(0);
    grow(rows, 2 * TILE * D);
    bf16* copies = rows.data() + copy * TILE * D;
    for (int i = 0; i < TILE; i++) {
      if (row(i))
        std::memcpy(copies + i * D, row(i), D * sizeof(bf16));
      else
        std::fill(copies + i * D, copies + (i + 1) * D, bf16{0});
    }
    return copies;
  }

  // The rows that come after those of neuron `m`, as many as are multiplied with at once.
  int64_t rows_after(const Group& group, int64_t m, const bf16** rows_of_next) const {
    const int64_t at_once = gated ? TILE : 2 * TILE;
    const int64_t end = std::min(m + 2 * at_once, group.count());
    int64_t count = 0;
    for (int64_t i = m + at_once; i < end; i++) {
      rows_of_next[count++] = group.neurons[i].up;
      if (gated) rows_of_next[count++] = group.neurons[i].gate;
    }
    return count;
  }

  // h of neurons from `m` on, times their gates, for some tokens: of 16 neurons and their
  // gates' rows, or of 32 where there are none. Neurons beyond the last are zero.
  void make_h(const Group& group, int64_t m, int64_t first, int64_t count) {
    const bf16* rows_first = rows_of(group, m, &Neuron::up, 0);
    const bf16* rows_second = gated ? rows_of(group, m, &Neuron::gate, 1)
                                    : rows_of(group, m + TILE, &Neuron::up, 1);
    const int64_t tiles = (count + TILE - 1) / TILE;
    const int64_t pairs = (tiles + 1) / 2;
    // Two tiles of tokens alone wait for memory whatever is fetched, and many tokens leave
    // no room for it.
    const bool pays_to_fetch = pairs > 1 && count * D <= X_BESIDE_ROWS;
    const bf16* next[2 * TILE];
    const int64_t nexts = pays_to_fetch ? rows_after(group, m, next) : 0;
    const int64_t width = group.width();
    int32_t* h = h_TU.data() + group.h_start + first * width + m / 2;
    const auto write = [&](int64_t tile) {
      const float* made = products[tile / 2 % 2];
      const int two = tile + 1 < tiles ? 2 : 1;
      write_h(group, m, made, two, first + tile * TILE, h + tile * TILE * width);
    };
    // Products are used while the next ones are made.
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const int64_t pair = tile / 2;
      const int64_t fetched = nexts * pair / pairs;
      const Ahead ahead{next + fetched, nexts * (pair + 1) / pairs - fetched};
      const int32_t* x = x_UL.data() + tile * D / 2 * TILE;
      const auto dots = tile + 1 < tiles ? tile_dots<2> : tile_dots<1>;
      dots(rows_first, rows_second, D, x, products[pair % 2], ahead);
      if (tile > 0) write(tile - 2);
    }
    write((tiles - 1) / 2 * 2);
  }

  // h of one or two tiles' tokens, to their lines.
  void write_h(const Group& group, int64_t m, const float* made, int tiles, int64_t first,
               int32_t* to) const {
    // h times the gate; zero where that is zero, whatever h is for a token of others.
    const auto gated_by = [&](int64_t neuron, int lane, Floats made_h) {
      if (neuron >= group.count()) return Floats{};
      const Floats gate = load(group.neurons[neuron].gate_T + first + lane);
      return gate != Floats{} ? made_h * gate : Floats{};
    };
    if (gated) {
      const auto h_of = [&](int i, int lane) {
        const Floats up = load(made + i * LINE + lane);
        const Floats of_gate = load(made + (TILE + i) * LINE + lane);
        return gated_by(m + i, lane, activated(of_gate, activation) * up);
      };
      write_units(h_of, tiles, to, group.width());
    } else {
      for (int half = 0; half < 2; half++) {
        const auto h_of = [&](int i, int lane) {
          const int neuron = half * TILE + i;
          const Floats up = load(made + neuron * LINE + lane);
          return gated_by(m + neuron, lane, activated(up, activation));
        };
        write_units(h_of, tiles, to + half * TILE / 2, group.width());
      }
    }
  }

  // Units of 16 neurons' h, eight of them in a line of every token.
  template <typename F>
  static void write_units(F h_of, int tiles, int32_t* to, int64_t width) {
    constexpr int HALF = TILE / 2;
    alignas(64) int32_t units_UL[TILE * TILE], lines[TILE * TILE];  // half with one tile
    for (int t = 0; t < tiles; t++)
      for (int u = 0; u < HALF; u++) {
        const Ints units = Unit<bf16>::make(h_of(2 * u, t * TILE), h_of(2 * u + 1, t * TILE));
        std::memcpy(units_UL + (t * HALF + u) * TILE, &units, sizeof units);
      }
    columns_of([&](int row) { return units_UL + row * TILE; }, lines);
    for (int t = 0; t < tiles; t++)
      for (int token = 0; token < TILE; token++)
        std::memcpy(to + (t * TILE + token) * width, lines + token * TILE + t * HALF,
                    HALF * sizeof(int32_t));
  }

  // y of outputs [i, end) += what neurons from `m` on give, as many as are woven at once.
  void add_outputs(const Group& group, int64_t m, int64_t i, int64_t end) {
    const int64_t units = std::min(most_units, group.width() - m / 2);
    weave(group, m, units, i, end);
    const int32_t* h = h_TU.data() + group.h_start + m / 2;
    for (int64_t t = 0; t < group.tokens; t += 2 * TILE) {
      if (group.pairs)
        add_picked(group, t, units, h + t * group.width(), i, end);
      else
        add_all(group, t, units, h + t * group.width(), i, end);
    }
  }

  // Rows of W_down in pairs, and zeros after them, for outputs [i, end).
  void weave(const Group& group, int64_t m, int64_t units, int64_t i, int64_t end) {
    grow(woven, units * (end - i));
    for (int64_t u = 0; u < units; u++) {
      const int64_t neuron = m + 2 * u;
      const bool is_there = neuron < group.count();
      const bool has_second = neuron + 1 < group.count();  // else h has a zero
      const bf16* one = is_there ? group.neurons[neuron].down : nullptr;
      const bf16* two = has_second ? group.neurons[neuron + 1].down : one;
      for (int64_t o = i; o < end; o += DEEP) {
        __m512bh both[2] = {};
        if (is_there) Unit<bf16>::read_rows<2>(one + o, two + o, both);
        std::memcpy(woven.data() + (o - i) * units + u * LINE, both, sizeof both);
      }
    }
  }

  // For two tiles of tokens from the group's token `first` on, whose y lie anywhere.
  void add_picked(const Group& group, int64_t first, int64_t units, const int32_t* h, int64_t i,
                  int64_t end) {
    float* y[2 * TILE];
    const int count = int(std::min<int64_t>(2 * TILE, group.tokens - first));
    for (int t = 0; t < count; t++) y[t] = y_TD + group.pairs[first + t].token * D;
    const auto add = [&](int64_t o) { add_to(y, count, o, products[o / DEEP % 2]); };
    for (int64_t o = i; o < end; o += DEEP) {
      for (int t = 0; t < count; t++) {
        __builtin_prefetch(y[t] + o, 1);
        __builtin_prefetch(y[t] + o + LANES, 1);
      }
      const int32_t* of_outputs = woven.data() + (o - i) * units;
      float* made = products[o / DEEP % 2];
      if (count > TILE)
        tile_outputs<2>(h, group.width(), of_outputs, units / TILE, made);
      else
        tile_outputs<1>(h, group.width(), of_outputs, units / TILE, made);
      if (o > i) add(o - DEEP);
    }
    add(end - DEEP);
  }

  // For two tiles of tokens whose y lie side by side.
  void add_all(const Group& group, int64_t first, int64_t units, const int32_t* h, int64_t i,
               int64_t end) {
    float* y = y_TD + (first_token + first) * D;
    const int64_t left = group.tokens - first;
    for (int64_t o = i; o < end; o += DEEP) {
      const int32_t* of_outputs = woven.data() + (o - i) * units;
      if (left >= 2 * TILE) {
        tile_sums<2>(h, group.width(), of_outputs, units / TILE, y + o, D);
      } else if (left == TILE) {
        tile_sums<1>(h, group.width(), of_outputs, units / TILE, y + o, D);
      } else {  // lines beyond the last token are not y's
        tile_outputs<2>(h, group.width(), of_outputs, units / TILE, products[0]);
        for (int64_t t = 0; t < left; t++) {
          float* to = y + t * D;
          add_to(&to, 1, o, products[0] + t * LINE);
        }
      }
    }
  }

  // 32 outputs of some tokens.
  static void add_to(float* const* y, int count, int64_t o, const float* made) {
    for (int t = 0; t < count; t++) {
      float* to = y[t] + o;
      store(to, load(to) + load(made + t * LINE));
      store(to + LANES, load(to + LANES) + load(made + t * LINE + LANES));
    }
  }
};

}  // namespace

#endif
