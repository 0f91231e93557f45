// Products of many tokens by tiles of 16 rows (Intel's AMX), in bfloat16.
//
// One instruction multiplies 16 rows of 32 numbers with 16 columns of 32 numbers. Weights
// are rows as they lie, tokens are packed as columns of pairs. h goes back as rows of
// tokens, and rows of W_down are woven into pairs. Per tile that is a quarter of a
// microsecond less than the products take, where tokens are many.
//
// Suffixes: U units (pairs of bfloat16), L lanes (tokens side by side), T tokens.

#pragma once

#include "panels.h"

#if !defined(__AMX_BF16__) || !defined(__AMX_TILE__) || !defined(__linux__)

namespace {
struct TileRegisters {};
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
constexpr int64_t BYTES_OF_LINE = 64;      // of a cache

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

// Products of one or two tiles of tokens with 32 outputs, over `steps` of 32 neurons.
template <int TILES>
ALONE void tile_outputs(const int32_t* h_TU, int64_t width, const int32_t* woven,
                        int64_t steps, float* products) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
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
  _tile_stored(0, products, LINE * 4);
  _tile_stored(1, products + TILE, LINE * 4);
  if (TILES == 2) {
    _tile_stored(2, products + TILE * LINE, LINE * 4);
    _tile_stored(3, products + TILE * LINE + TILE, LINE * 4);
  }
}

// --- experts ---------------------------------------------------------------------------

// A share of an expert, and where its h begin.
struct TiledShare : Share<bf16> {
  int64_t h_start;

  int64_t steps() const { return (to - from + DEEP - 1) / DEEP; }
  int64_t width() const { return steps() * TILE; }  // units of h of a token
  int64_t tiles() const { return (tokens + TILE - 1) / TILE; }
};

// First h of all experts, then y: so that y of some outputs stays in a cache for all.
struct TiledExperts {
  const bf16* x_TD;
  float* y_TD;
  int64_t D;
  int activation;

  // What a thread keeps.
  Lines<int32_t> x_UL;  // tile after tile, a line for every unit
  Lines<int32_t> h_TU;
  Lines<int32_t> woven;  // for every 32 outputs a line for every unit
  Lines<bf16> rows;      // that are filled up with zeros
  alignas(64) float gate_L[MOST_TOGETHER];
  alignas(64) float products[2][2 * TILE * LINE];  // of now, and of the time before

  // y += what all shares give, of `all_tokens` tokens in y.
  void run(const std::vector<Share<bf16>>& shares, const bf16* x, int64_t hidden_size,
           int activated_by, float* y, int64_t all_tokens) {
    x_TD = x;
    y_TD = y;
    D = hidden_size;
    activation = activated_by;
    std::vector<TiledShare> tiled;
    int64_t units = 0;
    for (const Share<bf16>& share : shares) {
      tiled.push_back({share, units});
      units += tiled.back().tiles() * TILE * tiled.back().width();
    }
    if (int64_t(h_TU.size()) < units) h_TU.resize(units);
    for (const TiledShare& share : tiled) make_all_h(share);
    const int64_t outputs = std::max<int64_t>(2 * DEEP, Y_NUMBERS / all_tokens / DEEP * DEEP);
    for (int64_t i = 0; i < D; i += outputs)
      for (const TiledShare& share : tiled) add_outputs(share, i, std::min(i + outputs, D));
  }

  void make_all_h(const TiledShare& share) {
    const int64_t fitting = std::min(MOST_TOGETHER, X_NUMBERS / D / TILE * TILE);
    const int64_t together = std::max<int64_t>(2 * TILE, fitting);
    const int beside = share.expert.gate_MD ? TILE : 2 * TILE;
    for (int64_t first = 0; first < share.tokens; first += together) {
      const int64_t count = std::min(together, share.tokens - first);
      fill(share.pairs + first, count);
      int32_t* h = h_TU.data() + share.h_start + first * share.width();
      for (int64_t m = 0; m < share.steps() * DEEP; m += beside)
        make_h(share, m, (count + TILE - 1) / TILE, h + m / 2);
    }
  }

  // Tokens as tiles; those that are not there are the last one, with no gate.
  void fill(const Pair* pairs, int64_t count) {
    const int64_t tiles = (count + TILE - 1) / TILE;
    if (int64_t(x_UL.size()) < tiles * TILE * D / 2) x_UL.resize(tiles * TILE * D / 2);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int32_t* x[TILE];
      for (int j = 0; j < TILE; j++) {
        const int64_t t = tile * TILE + j;
        const Pair& pair = pairs[std::min(t, count - 1)];
        x[j] = (const int32_t*)(x_TD + pair.token * D);
        gate_L[t] = t < count ? pair.gate : 0;
      }
      for (int64_t u = 0; u < D / 2; u += TILE)
        columns_of([&](int row) { return x[row] + u; },
                   x_UL.data() + (tile * D / 2 + u) * TILE);
    }
  }

  // h of neurons from `m` on, times their gates, for some tiles of tokens: of 16 neurons
  // and their gates' rows, or of 32 where there are none. Neurons beyond the last are zero.
  void make_h(const TiledShare& share, int64_t m, int64_t tiles, int32_t* h) {
    const bool gated = share.expert.gate_MD != nullptr;
    const bf16* first = share.expert.up_MD + (share.from + m) * D;
    const bf16* second =
        gated ? share.expert.gate_MD + (share.from + m) * D : first + TILE * D;
    const int64_t left = share.to - share.from - m;
    if (left < (gated ? TILE : 2 * TILE)) {
      rows.resize(2 * TILE * D);
      fill_up(first, left, rows.data());
      fill_up(second, gated ? left : left - TILE, rows.data() + TILE * D);
      first = rows.data();
      second = first + TILE * D;
    }
    const auto write = [&](int64_t tile) {
      const int64_t width = share.width();
      const int two = tile + 1 < tiles ? 2 : 1;
      const float* made = products[tile / 2 % 2];
      write_h(made, gated, two, gate_L + tile * TILE, h + tile * TILE * width, width);
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

  // h of one or two tiles' tokens, to their rows, `width` apart.
  void write_h(const float* made, bool gated, int tiles, const float* gate, int32_t* to,
               int64_t width) const {
    if (gated) {
      const auto h_of = [&](int m, int lane) {
        const Floats up = load(made + m * LINE + lane);
        const Floats of_gate = load(made + (TILE + m) * LINE + lane);
        return activated(of_gate, activation) * up * load(gate + lane);
      };
      write_units(h_of, tiles, to, width);
    } else {
      for (int half = 0; half < 2; half++) {
        const auto h_of = [&](int m, int lane) {
          const Floats up = load(made + (half * TILE + m) * LINE + lane);
          return activated(up, activation) * load(gate + lane);
        };
        write_units(h_of, tiles, to + half * TILE / 2, width);
      }
    }
  }

  // `count` rows and as many of zeros as make 16.
  void fill_up(const bf16* from, int64_t count, bf16* to) const {
    const int64_t there = std::clamp<int64_t>(count, 0, TILE);
    std::copy(from, from + there * D, to);
    std::fill(to + there * D, to + TILE * D, bf16{0});
  }

  // Units of 16 neurons' h, eight of them in a row of every token.
  template <typename F>
  static void write_units(F h_of, int tiles, int32_t* to, int64_t width) {
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
        std::memcpy(to + (t * TILE + token) * width, lines + token * TILE + t * HALF,
                    HALF * sizeof(int32_t));
  }

  // Rows of W_down for outputs [i, end), in pairs, and zeros after them.
  void weave(const TiledShare& share, int64_t i, int64_t end) {
    const int64_t units = share.width();
    const int64_t there = share.to - share.from;
    if (int64_t(woven.size()) < units * (end - i)) woven.resize(units * (end - i));
    for (int64_t u = 0; u < units; u++) {
      const int64_t m = 2 * u;
      const bf16* one = share.expert.down_MD + (share.from + m) * D;
      const bf16* two = m + 1 < there ? one + D : one;  // where there is none h is zero
      for (int64_t o = i; o < end; o += DEEP) {
        __m512bh both[2] = {};
        if (m < there) Unit<bf16>::read_rows<2>(one + o, two + o, both);
        std::memcpy(woven.data() + (o - i) * units + u * LINE, both, sizeof both);
      }
    }
  }

  // y of outputs [i, end) += what a share's neurons give.
  void add_outputs(const TiledShare& share, int64_t i, int64_t end) {
    weave(share, i, end);
    const int64_t width = share.width();
    for (int64_t tile = 0; tile < share.tiles(); tile += 2) {
      const int32_t* h = h_TU.data() + share.h_start + tile * TILE * width;
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
};

}  // namespace

#endif
