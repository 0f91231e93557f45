// Products of many tokens by tiles of 16 rows (Intel's AMX), in bfloat16.
//
// One instruction multiplies 16 rows of 32 numbers with 16 columns of 32 numbers. Weights
// are rows as they lie; tokens are packed as columns of pairs for each expert. h goes back
// as rows of tokens, and rows of W_down are woven into pairs.
//
// A sum for every token, expert and output takes longer than the products of a small
// expert. So where most tokens run a share, its h lie beside those of others in lines of
// all tokens, zero for tokens that do not run it, and sums stay in registers.
//
// Suffixes: U units (pairs of bfloat16), L lanes (tokens side by side), T tokens.

#pragma once

#include "panels.h"

#if !defined(__AMX_BF16__) || !defined(__AMX_TILE__) || !defined(__linux__)

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
constexpr int64_t MOST_TOGETHER = 512;     // tokens of that kind
constexpr int64_t Y_NUMBERS = 1 << 18;     // of y that stay in the second cache
constexpr int64_t MOST_UNITS = 256;        // pairs of rows of W_down that are woven at once
constexpr int64_t MOST_OUTPUTS = 1024;     // numbers of such rows

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
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
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

// Products of twice 16 rows of D numbers with one or two tiles of tokens: those of the
// second rows below, those of the second tile beside.
template <int TILES>
ALONE void tile_dots(const bf16* first, const bf16* second, int64_t D, const int32_t* x_UL,
                     float* products) {
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

// A share of an expert, and where its h are: in lines of all tokens, zero for those that do
// not run it, or in lines of its own.
struct TiledShare : Share<bf16> {
  bool in_all = false;
  int64_t start = 0;  // of its h: of lines, or among the units of a line of all
  int64_t width = 0;  // units of a line

  int64_t count() const { return to - from; }
  int64_t steps() const { return (count() + DEEP - 1) / DEEP; }
  int64_t tiles() const { return (tokens + TILE - 1) / TILE; }

  // To skip tokens costs a sum for each that is there. Measured: 60 ticks for two tiles of
  // tokens, 32 neurons and 32 outputs; 48, and 300 for the sums, where tokens are picked.
  bool pays_for_all(int64_t all_tokens) const {
    const double picked = double(tokens) / all_tokens * (48.0 * steps() + 300);
    return picked > 60.0 * count() / DEEP;
  }
};

// First h of all experts, then y: so that y of some outputs stays in a cache for all.
struct TiledExperts {
  const bf16* x_TD;
  float* y_TD;
  int64_t D;
  int activation;
  int64_t first_token, all_tokens;

  // What a thread keeps.
  Lines<int32_t> x_UL;   // tile after tile, a line for every unit
  Lines<int32_t> h_own;  // h of each share in lines of its own
  Lines<int32_t> h_TU;   // h of all tokens, the shares' beside each other
  int64_t all_units;     // of a line of it
  Lines<int32_t> woven;  // for every 32 outputs a line for every unit
  Lines<bf16> rows;      // that are filled up with zeros
  std::vector<const bf16*> down;     // rows of W_down of the shares that lie side by side
  alignas(64) float gate_L[MOST_TOGETHER];
  int32_t* h_L[MOST_TOGETHER];
  Lines<int32_t> nobody;  // h of lanes without a token
  alignas(64) float products[2][2 * TILE * LINE];  // of now, and of the time before

  // y += what all shares give, for tokens [begin, end).
  void run(const std::vector<Share<bf16>>& shares, const bf16* x, int64_t hidden_size,
           int activated_by, float* y, int64_t begin, int64_t end) {
    x_TD = x;
    y_TD = y;
    D = hidden_size;
    activation = activated_by;
    first_token = begin;
    all_tokens = end - begin;
    const std::vector<TiledShare> tiled = placed(shares);
    for (const TiledShare& share : tiled) make_all_h(share);
    const int64_t fitting = std::max<int64_t>(2 * DEEP, Y_NUMBERS / all_tokens / DEEP * DEEP);
    const int64_t outputs = std::min(MOST_OUTPUTS, fitting);
    for (int64_t i = 0; i < D; i += outputs) {
      const int64_t until = std::min(i + outputs, D);
      for (const TiledShare& share : tiled)
        if (!share.in_all) add_picked(share, i, until);
      for (int64_t unit = 0; unit < all_units; unit += MOST_UNITS)
        add_all(unit, std::min(MOST_UNITS, all_units - unit), i, until);
    }
  }

  template <typename N>
  static void grow(Lines<N>& kept, int64_t count) {
    if (int64_t(kept.size()) < count) kept.resize(count);
  }

  // Decides where the h of each share are, and makes room for them.
  std::vector<TiledShare> placed(const std::vector<Share<bf16>>& shares) {
    std::vector<TiledShare> tiled;
    int64_t own = 0;
    down.clear();
    for (const Share<bf16>& given : shares) {
      TiledShare share{given};
      share.in_all = share.pays_for_all(all_tokens);
      if (share.in_all) {
        share.start = int64_t(down.size()) / 2;
        for (int64_t m = share.from; m < share.to; m++)
          down.push_back(share.expert.down_MD + m * D);
        if (down.size() % 2) down.push_back(nullptr);
      } else {
        share.start = own;
        share.width = share.steps() * TILE;
        own += share.tiles() * TILE * share.width;
      }
      tiled.push_back(share);
    }
    const int64_t used = int64_t(down.size()) / 2;
    all_units = (used + TILE - 1) / TILE * TILE;
    down.resize(2 * all_units);
    const int64_t width = all_units + TILE;  // a share's last units may lie beyond all
    int64_t most = width;
    for (TiledShare& share : tiled) {
      if (share.in_all) share.width = width;
      most = std::max(most, share.width);
    }
    const int64_t lines = (all_tokens + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
    grow(h_own, own);
    grow(h_TU, lines * width);
    grow(nobody, most);
    for (int64_t t = 0; t < all_tokens; t++) {  // zero times what was there may be no number
      int32_t* line = h_TU.data() + t * width;
      std::fill(line + used, line + all_units, 0);
    }
    return tiled;
  }

  void make_all_h(const TiledShare& share) {
    const int64_t fitting = std::min(MOST_TOGETHER, X_NUMBERS / D / TILE * TILE);
    const int64_t together = std::max<int64_t>(2 * TILE, fitting);
    const int beside = share.expert.gate_MD ? TILE : 2 * TILE;
    if (share.in_all) clear_others(share);
    for (int64_t first = 0; first < share.tokens; first += together) {
      const int64_t count = std::min(together, share.tokens - first);
      fill(share, first, count);
      for (int64_t m = 0; m < share.steps() * DEEP; m += beside)
        make_h(share, m, (count + TILE - 1) / TILE);
    }
  }

  // Where the h of a token begin.
  int32_t* line_of(const TiledShare& share, int64_t number) {
    if (!share.in_all) return h_own.data() + share.start + number * share.width;
    const int64_t token = share.pairs[number].token - first_token;
    return h_TU.data() + token * share.width + share.start;
  }

  // Zeros for tokens that do not run a share. Its tokens are in order.
  void clear_others(const TiledShare& share) {
    int64_t number = 0;
    for (int64_t t = 0; t < all_tokens; t++) {
      if (number < share.tokens && share.pairs[number].token - first_token == t) {
        number++;
        continue;
      }
      int32_t* line = h_TU.data() + t * share.width + share.start;
      std::fill(line, line + (share.count() + 1) / 2, 0);
    }
  }

  // Tokens as tiles; those that are not there are the last one, with no gate.
  void fill(const TiledShare& share, int64_t first, int64_t count) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    grow(x_UL, tiles * TILE * D / 2);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int32_t* x[TILE];
      for (int j = 0; j < TILE; j++) {
        const int64_t t = tile * TILE + j;
        const int64_t number = first + std::min(t, count - 1);
        const Pair& pair = share.pairs[number];
        x[j] = (const int32_t*)(x_TD + pair.token * D);
        gate_L[t] = t < count ? pair.gate : 0;
        h_L[t] = t < count ? line_of(share, number) : nobody.data();
      }
      fill_tile(x, D, x_UL.data() + tile * D / 2 * TILE);
    }
  }

  // h of neurons from `m` on, times their gates, for some tiles of tokens: of 16 neurons
  // and their gates' rows, or of 32 where there are none. Neurons beyond the last are zero.
  void make_h(const TiledShare& share, int64_t m, int64_t tiles) {
    const bool gated = share.expert.gate_MD != nullptr;
    const bf16* first = share.expert.up_MD + (share.from + m) * D;
    const bf16* second =
        gated ? share.expert.gate_MD + (share.from + m) * D : first + TILE * D;
    const int64_t left = share.count() - m;
    if (left < (gated ? TILE : 2 * TILE)) {
      grow(rows, 2 * TILE * D);
      fill_up(first, left, D, rows.data());
      fill_up(second, gated ? left : left - TILE, D, rows.data() + TILE * D);
      first = rows.data();
      second = first + TILE * D;
    }
    const auto write = [&](int64_t tile) {
      const int two = tile + 1 < tiles ? 2 : 1;
      write_h(products[tile / 2 % 2], gated, two, tile * TILE, m / 2);
    };
    // Products are used while the next ones are made.
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const int32_t* x = x_UL.data() + tile * D / 2 * TILE;
      if (tile + 1 < tiles)
        tile_dots<2>(first, second, D, x, products[tile / 2 % 2]);
      else
        tile_dots<1>(first, second, D, x, products[tile / 2 % 2]);
      if (tile > 0) write(tile - 2);
    }
    write((tiles - 1) / 2 * 2);
  }

  // h of one or two tiles' tokens, to their lines, from a unit on.
  void write_h(const float* made, bool gated, int tiles, int64_t first, int64_t unit) const {
    const float* gate = gate_L + first;
    if (gated) {
      const auto h_of = [&](int m, int lane) {
        const Floats up = load(made + m * LINE + lane);
        const Floats of_gate = load(made + (TILE + m) * LINE + lane);
        return activated(of_gate, activation) * up * load(gate + lane);
      };
      write_units(h_of, tiles, first, unit);
    } else {
      for (int half = 0; half < 2; half++) {
        const auto h_of = [&](int m, int lane) {
          const Floats up = load(made + (half * TILE + m) * LINE + lane);
          return activated(up, activation) * load(gate + lane);
        };
        write_units(h_of, tiles, first, unit + half * TILE / 2);
      }
    }
  }

  // Units of 16 neurons' h, eight of them in a line of every token.
  template <typename F>
  void write_units(F h_of, int tiles, int64_t first, int64_t unit) const {
    constexpr int HALF = TILE / 2;
    alignas(64) int32_t units_UL[TILE * TILE], lines[TILE * TILE];
    for (int t = 0; t < tiles; t++)
      for (int u = 0; u < HALF; u++) {
        const Ints units = Unit<bf16>::make(h_of(2 * u, t * TILE), h_of(2 * u + 1, t * TILE));
        std::memcpy(units_UL + (t * HALF + u) * TILE, &units, sizeof units);
      }
    columns_of([&](int row) { return units_UL + row * TILE; }, lines);
    for (int t = 0; t < tiles; t++)
      for (int token = 0; token < TILE; token++)
        std::memcpy(h_L[first + t * TILE + token] + unit, lines + token * TILE + t * HALF,
                    HALF * sizeof(int32_t));
  }

  // `units` pairs of rows of W_down, null where there is none, for outputs [i, end).
  template <typename RowOf>
  void weave(RowOf row_of, int64_t units, int64_t i, int64_t end) {
    grow(woven, units * (end - i));
    for (int64_t u = 0; u < units; u++) {
      const bf16* one = row_of(2 * u);
      const bf16* two = row_of(2 * u + 1);
      if (!two) two = one;  // h has a zero
      for (int64_t o = i; o < end; o += DEEP) {
        __m512bh both[2] = {};
        if (one) Unit<bf16>::read_rows<2>(one + o, two + o, both);
        std::memcpy(woven.data() + (o - i) * units + u * LINE, both, sizeof both);
      }
    }
  }

  // y of outputs [i, end) += what a share in lines of its own gives.
  void add_picked(const TiledShare& share, int64_t i, int64_t end) {
    const auto row_of = [&](int64_t m) -> const bf16* {
      return m < share.count() ? share.expert.down_MD + (share.from + m) * D : nullptr;
    };
    weave(row_of, share.width, i, end);
    const int64_t width = share.width;
    for (int64_t tile = 0; tile < share.tiles(); tile += 2) {
      const int32_t* h = h_own.data() + share.start + tile * TILE * width;
      float* y[2 * TILE];
      const int count = int(std::min<int64_t>(2 * TILE, share.tokens - tile * TILE));
      for (int t = 0; t < count; t++) y[t] = y_TD + share.pairs[tile * TILE + t].token * D;
      const auto add = [&](int64_t o) { add_to(y, count, o, products[o / DEEP % 2]); };
      for (int64_t o = i; o < end; o += DEEP) {
        for (int t = 0; t < count; t++) {
          __builtin_prefetch(y[t] + o, 1);
          __builtin_prefetch(y[t] + o + LANES, 1);
        }
        const int32_t* of_outputs = woven.data() + (o - i) * width;
        float* made = products[o / DEEP % 2];
        if (tile + 1 < share.tiles())
          tile_outputs<2>(h, width, of_outputs, share.steps(), made);
        else
          tile_outputs<1>(h, width, of_outputs, share.steps(), made);
        if (o > i) add(o - DEEP);
      }
      add(end - DEEP);
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

  // y of outputs [i, end) += what units [unit, unit + units) of lines of all tokens give.
  void add_all(int64_t unit, int64_t units, int64_t i, int64_t end) {
    weave([&](int64_t m) { return down[2 * unit + m]; }, units, i, end);
    const int64_t width = all_units + TILE;
    const int64_t steps = units / TILE;
    for (int64_t t = 0; t < all_tokens; t += 2 * TILE) {
      const int32_t* h = h_TU.data() + t * width + unit;
      float* y = y_TD + (first_token + t) * D;
      const int64_t left = all_tokens - t;
      for (int64_t o = i; o < end; o += DEEP) {
        const int32_t* of_outputs = woven.data() + (o - i) * units;
        if (left >= 2 * TILE) {
          tile_sums<2>(h, width, of_outputs, steps, y + o, D);
        } else if (left == TILE) {
          tile_sums<1>(h, width, of_outputs, steps, y + o, D);
        } else {  // lines beyond the last token are not y's
          tile_outputs<2>(h, width, of_outputs, steps, products[0]);
          for (int64_t j = 0; j < left; j++) {
            float* to = y + j * D;
            add_to(&to, 1, o, products[0] + j * LINE);
          }
        }
      }
    }
  }
};

}  // namespace

#endif
