// Routed experts on a CPU: every chosen expert of every token, in one call.
//
//     y_t = sum over chosen e of gate_te * Down_e (act(Gate_e x_t) * (Up_e x_t))
//
// Built on first use (kernels/build.py). Few tokens are taken some at a time, so that a row
// of weights is read once for them, and neurons in groups that stay in the cache. Many are
// taken as panels (panels.h), or in bfloat16 as tiles where the processor has them (tiles.h).
//
// Suffixes: T tokens, K experts of a token (at most, by thresholds), R experts, M neurons of
// one as they are stored, D hidden size, C directions.

#include "tiles.h"

namespace {

constexpr int64_t NOBODY = -1;  // an index that is no expert's

#if defined(__AVX512F__)
constexpr int TOKENS = 6;  // that share a row of weights in registers
constexpr int FEW = 4;     // tokens that fill no vector of a panel
#else
constexpr int TOKENS = 2;
constexpr int FEW = 2;
#endif
constexpr int GROUP = 32;           // neurons whose h are made before they are used
constexpr int64_t CHUNK = 512;     // of y that stays in the first cache meanwhile
constexpr int64_t CACHE = 400000;  // bytes of weights that stay in the second cache
constexpr int PANEL_GROUP = 256;   // neurons whose h are made before panels use them
constexpr int MOST_ROWS = 2 * PANEL_GROUP;
constexpr int MANY = 64;           // tokens that pay for a copy of rows
constexpr int PICKED = 8;          // neurons that take as long as to pick a token
constexpr int MOST_PANELS = int(TOGETHER / PANEL);
constexpr int64_t MOST_SUMS = 1 << 24;  // that all threads together keep
constexpr int64_t TILED_TOKENS = 512;  // that a thread takes at once by tiles
constexpr int64_t SPLIT_TOKENS = 64;  // of each thread, from where threads share tokens out
constexpr int64_t SPLIT_TILED = 256;  // the same where tiles multiply: weights are read once

// --- experts ---------------------------------------------------------------------------

// What a thread keeps of panels: copies of rows, products with them, and h as units.
struct Scratch {
  Lines<int32_t> rows, h;
  Lines<float> products;

  Scratch()
      : rows(MOST_ROWS * SLICE),  // or a piece of each row of W_down, which is less
        h(MOST_PANELS * PANEL_GROUP * PANEL),
        products(MOST_PANELS * MOST_ROWS * PANEL) {}
  float* products_of(int panel) { return products.data() + panel * MOST_ROWS * PANEL; }
  int32_t* h_of(int panel) { return h.data() + panel * PANEL_GROUP * PANEL; }
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
    // One after the other, each with all of its tokens; the last products write beyond.
    constexpr int AT_ONCE = N == 1 ? 4 : 2;
    float g[GROUP * N + 2 * LANES], h[GROUP * N + 2 * LANES], of_pair[N];
    for (int t = 0; t < N; t++) of_pair[t] = pairs[t].gate;
    for (int64_t start = from; start < to; start += GROUP) {
      const int count = int(std::min<int64_t>(GROUP, to - start));
      for (int m = 0; m < count; m += AT_ONCE) {
        const T* rows[2 * AT_ONCE];
        for (int r = 0; r < AT_ONCE; r++) {
          // The last one is done again where fewer are left.
          const int64_t neuron = std::min(start + m + r, to - 1);
          rows[r] = expert.up_MD + neuron * D;
          rows[AT_ONCE + r] = gated ? expert.gate_MD + neuron * D : nullptr;
        }
        float products[(2 * AT_ONCE * N + LANES - 1) / LANES * LANES];
        if (gated)
          dots<2 * AT_ONCE, N>(rows, x, D, products);
        else
          dots<AT_ONCE, N>(rows, x, D, products);
        std::memcpy(h + m * N, products, AT_ONCE * N * sizeof(float));
        if (gated) std::memcpy(g + m * N, products + AT_ONCE * N, AT_ONCE * N * sizeof(float));
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

  // Some neurons of an expert, and the gates by which tokens in panels run them.
  struct Piece {
    Expert<T> expert;
    int64_t from;
    int count;
    const float* gate_L;

    int units() const { return (count + Unit<T>::numbers - 1) / Unit<T>::numbers; }
  };

  // Kept between calls; of a thread, for one run of panels after the other.
  static Scratch& kept_scratch() {
    static thread_local Scratch scratch;
    return scratch;
  }
  static Panels<T>& kept_panels() {
    static thread_local Panels<T> panels;
    return panels;
  }

  // Neurons [from, to) of one expert, for tokens that share weights in a cache.
  void run_all_panels(const Expert<T>& expert, int64_t from, int64_t to, const Pair* pairs,
                      int tokens, float* y_TD) const {
    Panels<T>& panels = kept_panels();
    panels.fill(x_TD, D, pairs, tokens, y_TD);
    for (int64_t start = from; start < to; start += PANEL_GROUP) {
      const int count = int(std::min<int64_t>(PANEL_GROUP, to - start));
      run_panels({{expert, start, count, panels.gate_L}}, panels);
    }
  }

  // Pieces of PANEL_GROUP neurons together at most, for the tokens of some panels.
  void run_panels(const std::vector<Piece>& pieces, const Panels<T>& panels) const {
    Scratch& scratch = kept_scratch();
    int units = 0;
    for (const Piece& piece : pieces) {
      multiply(piece.expert, piece.from, piece.count, panels, scratch);
      for (int p = 0; p < panels.count; p++) make_units(piece, units, panels, p, scratch);
      units += piece.units();
    }
    // Rows of W_down lie far apart, so that in a cache they are in each other's way.
    if (pieces.size() > 1 || panels.of_tokens >= MANY) {
      for_each_piece(D, [&](auto vectors, int64_t i) {
        constexpr int W = decltype(vectors)::value;
        int32_t* to = scratch.rows.data();
        for (const Piece& piece : pieces) {
          copy_outputs<W, T>(piece.expert.down_MD + piece.from * D + i, D, piece.count, to);
          to += piece.units() * W * LANES;
        }
        const int rows = units * Unit<T>::numbers;
        for (int p = 0; p < panels.count; p++)
          add_outputs<W>(scratch.rows.data(), W * LANES, rows, i, panels, p, scratch);
      });
    } else {
      const Piece& piece = pieces[0];
      for (int p = 0; p < panels.count; p++)
        for_each_piece(D, [&](auto vectors, int64_t i) {
          constexpr int W = decltype(vectors)::value;
          const T* rows = piece.expert.down_MD + piece.from * D + i;
          add_outputs<W>(rows, D, piece.count, i, panels, p, scratch);
        });
    }
  }

  // Calls `run` with the vectors of every piece of a row, as a constant, and where it begins.
  template <typename F>
  static void for_each_piece(int64_t D, F run) {
    int64_t i = 0;
    for (; i + WIDE * LANES <= D; i += WIDE * LANES)
      run(std::integral_constant<int, WIDE>(), i);
    for (; i < D; i += REST * LANES) run(std::integral_constant<int, REST>(), i);
  }

  // Whether rows of W_up and W_gate are copied: where they are widened, which once is enough.
  static bool pays_to_copy(const Panels<T>& panels) {
    const bool are_widened = sizeof(T) < 4 && Unit<T>::numbers == 1;
    return are_widened && panels.of_tokens >= MANY;
  }

  // Products of the rows of W_up, and after them of W_gate, with all panels.
  void multiply(const Expert<T>& expert, int64_t from, int count, const Panels<T>& panels,
                Scratch& scratch) const {
    const bool copied = pays_to_copy(panels);
    const int64_t units = D / Unit<T>::numbers;
    const int64_t slice = copied ? SLICE : units;
    int32_t* copies = scratch.rows.data();
    for (int64_t u = 0; u < units; u += slice) {
      const int64_t length = std::min(slice, units - u);
      const T* up = expert.up_MD + from * D + u * Unit<T>::numbers;
      const T* gate = gated ? expert.gate_MD + from * D + u * Unit<T>::numbers : nullptr;
      if (copied) copy_slice(up, length, count, copies);
      if (copied && gated) copy_slice(gate, length, count, copies + count * SLICE);
      for (int p = 0; p < panels.count; p++)
        panels.with_vectors(p, [&](auto vectors) {
          constexpr int V = decltype(vectors)::value;
          const int32_t* x_UL = panels.x(p) + u * V * LANES;
          float* products = scratch.products_of(p);
          const auto run = [&](const auto* rows, int64_t apart, float* to) {
            rows_by_panel<V>(rows, apart, count, x_UL, length, u == 0, to);
          };
          if (copied) {
            run(copies, SLICE, products);
            if (gated) run(copies + count * SLICE, SLICE, products + count * PANEL);
          } else {
            run(up, D, products);
            if (gated) run(gate, D, products + count * PANEL);
          }
        });
    }
  }

  template <int V, typename R>
  void rows_by_panel(const R* rows, int64_t apart, int count, const int32_t* x_UL,
                     int64_t length, bool are_first, float* products) const {
    constexpr int ROWS = rows_beside(V);
    int r = 0;
    for (; r + ROWS <= count; r += ROWS)
      panel_dots<ROWS, V, T>(rows + r * apart, apart, x_UL, length, are_first,
                             products + r * PANEL);
    for (; r + 2 <= count; r += 2)
      panel_dots<2, V, T>(rows + r * apart, apart, x_UL, length, are_first,
                          products + r * PANEL);
    if (r < count)
      panel_dots<1, V, T>(rows + r * apart, apart, x_UL, length, are_first,
                          products + r * PANEL);
  }

  // Units of rows, SLICE apart.
  void copy_slice(const T* rows, int64_t length, int count, int32_t* to) const {
    for (int m = 0; m < count; m++)
      for (int64_t v = 0; v < length; v += LANES) {
        const Ints units = Unit<T>::read(rows + m * D + v * Unit<T>::numbers);
        std::memcpy(to + m * SLICE + v, &units, sizeof units);
      }
  }

  // h of a piece's neurons for a panel's tokens, times their gates, as units from `first` on;
  // zero where the gate is, whatever h is for a token of others. (Within others it crashes
  // GCC 12 for AVX-512 without bfloat16.)
  ALONE void make_units(const Piece& piece, int first, const Panels<T>& panels, int p,
                        Scratch& scratch) const {
    const float* products = scratch.products_of(p);
    const float* gate_L = piece.gate_L + p * PANEL;
    int32_t* h_UL = scratch.h_of(p) + first * PANEL;
    const auto h_of = [&](int m, int lane) {
      if (m >= piece.count) return Floats{};
      const Floats up = load(products + m * PANEL + lane);
      const float* of_gate = products + (piece.count + m) * PANEL + lane;
      const Floats made =
          gated ? activated(load(of_gate), activation) * up : activated(up, activation);
      const Floats gate = load(gate_L + lane);
      return gate != Floats{} ? made * gate : Floats{};
    };
    for (int m = 0; m < piece.count; m += Unit<T>::numbers) {
      for (int lane = 0; lane < panels.vectors(p) * LANES; lane += LANES) {
        const Ints units = Unit<T>::make(h_of(m, lane), h_of(m + 1, lane));
        std::memcpy(h_UL + lane, &units, sizeof units);
      }
      h_UL += PANEL;
    }
  }

  // y of a panel's tokens += h . W_down, for W vectors of outputs from `i` on.
  template <int W, typename R>
  void add_outputs(const R* rows, int64_t apart, int count, int64_t i, const Panels<T>& panels,
                   int p, Scratch& scratch) const {
    for (int t = 0; t < panels.tokens(p); t += PANEL_TOKENS) {
      if (t + 2 * PANEL_TOKENS <= PANEL) fetch_outputs<W>(panels.y(p) + t + PANEL_TOKENS, i);
      panel_add<PANEL_TOKENS, W, T>(rows, apart, count, scratch.h_of(p) + t, panels.y(p) + t,
                                    i);
    }
  }

  // y of the next tokens, while products of these are made.
  template <int W>
  static void fetch_outputs(float* const* y, int64_t i) {
    for (int t = 0; t < PANEL_TOKENS; t++)
      for (int w = 0; w < W; w++) __builtin_prefetch(y[t] + i + w * LANES, 1);
  }

  // How many of an expert's tokens run as panels: all but a few that would leave most of a
  // vector empty.
  int64_t in_panels(int64_t count) const {
    if (D % (2 * LANES) != 0) return 0;
    const int64_t rest = count % LANES;
    return rest <= FEW ? count - rest : count;
  }

  // y of tokens [begin, end) += what all shares give.
  void run_all(const std::vector<Share<T>>& shares, int64_t begin, int64_t end,
               float* y_TD) const {
    std::vector<Share<T>> for_all;
    for (const Share<T>& share : run_tiles(shares, begin, end, y_TD)) {
      if (pays_for_all(share, end - begin))
        for_all.push_back(share);
      else
        run(share, y_TD);
    }
    run_for_all(for_all, begin, end, y_TD);
  }

  // Whether a share takes less time for all tokens than for its own. To pick tokens, and to
  // add to what they have, takes as long as PICKED neurons, as measured.
  bool pays_for_all(const Share<T>& share, int64_t all_tokens) const {
    if (all_tokens < LANES || in_panels(all_tokens) == 0) return false;
    const int64_t neurons = share.to - share.from;
    return share.tokens * (neurons + PICKED) > all_tokens * neurons;
  }

  // y of tokens [begin, end) += what these shares give, with zero as gate of tokens that do
  // not run one: tokens are put side by side once for all shares. What is no finite number
  // in W_down reaches all tokens.
  void run_for_all(std::vector<Share<T>>& shares, int64_t begin, int64_t end,
                   float* y_TD) const {
    static thread_local Lines<float> gate_SL;
    Panels<T>& panels = kept_panels();
    gate_SL.resize(shares.size() * TOGETHER);
    const int64_t many = begin + in_panels(end - begin);
    for (int64_t first = begin; first < many && !shares.empty(); first += TOGETHER) {
      const int64_t last = std::min(first + TOGETHER, many);
      std::vector<Pair> tokens;
      for (int64_t t = first; t < last; t++) tokens.push_back({int32_t(t), 1.0f});
      panels.fill(x_TD, D, tokens.data(), int(tokens.size()), y_TD);
      std::fill(gate_SL.data(), gate_SL.data() + gate_SL.size(), 0.0f);
      std::vector<Piece> pieces;
      int room = PANEL_GROUP;
      for (size_t s = 0; s < shares.size(); s++) {
        Share<T>& share = shares[s];
        float* gate_L = gate_SL.data() + s * TOGETHER;
        for (; share.tokens > 0 && share.pairs->token < last; share.pairs++, share.tokens--)
          gate_L[share.pairs->token - first] += share.pairs->gate;  // it may be there twice
        for (int64_t from = share.from; from < share.to;) {
          const int count = int(std::min<int64_t>(room, share.to - from));
          pieces.push_back({share.expert, from, count, gate_L});
          from += count;
          room -= pieces.back().units() * Unit<T>::numbers;
          if (room > 0) continue;
          run_panels(pieces, panels);
          pieces.clear();
          room = PANEL_GROUP;
        }
      }
      if (!pieces.empty()) run_panels(pieces, panels);
    }
    for (const Share<T>& share : shares) run(share, y_TD);  // what is left, few tokens
  }

  // Whether the processor has tiles, and numbers that fit them.
  bool has_tiles() const {
    return std::is_same<T, bf16>::value && tiles_are_there() && D % (2 * LANES) == 0;
  }

  // Those with many tokens by tiles; the others are left.
  std::vector<Share<T>> run_tiles(const std::vector<Share<T>>& shares, int64_t begin,
                                  int64_t end, float* y_TD) const {
#if defined(HAS_TILES)
    if constexpr (std::is_same<T, bf16>::value)
      if (has_tiles()) {
        static thread_local TiledExperts tiled;
        std::vector<Share<T>> few, many;
        for (const Share<T>& share : shares) (share.tokens > FEW ? many : few).push_back(share);
        if (!many.empty()) tiled.run(many, x_TD, D, activation, y_TD, begin, end);
        return few;
      }
#endif
    return shares;
  }

  void run(const Share<T>& share, float* y_TD) const {
    const Expert<T>& expert = share.expert;
    const int64_t from = share.from;
    const int64_t to = share.to;
    const Pair* pairs = share.pairs;
    int64_t count = share.tokens;
    const int64_t many = in_panels(count);
    for (int64_t first = 0; first < many; first += TOGETHER) {
      const int together = int(std::min(TOGETHER, many - first));
      run_all_panels(expert, from, to, pairs + first, together, y_TD);
    }
    pairs += many;
    count -= many;
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

// Every thread takes tokens of its own, with all of their experts.
template <typename T>
void by_tokens(const Experts<T>& experts, const int64_t* index_TK, const float* gate_TK,
               float* y_TD, T* out_TD, int64_t tokens, int64_t K, int threads) {
  const int64_t D = experts.D;
#pragma omp parallel num_threads(threads)
  {
    const TileRegisters registers;
    const Part mine(tokens);
    std::fill(y_TD + mine.begin * D, y_TD + mine.end * D, 0.0f);
    const int64_t at_once = experts.has_tiles() ? TILED_TOKENS : tokens;
    for (int64_t begin = mine.begin; begin < mine.end; begin += at_once) {
      const int64_t end = std::min(begin + at_once, mine.end);
      const Sorted sorted(index_TK, gate_TK, begin, end, K, experts.R,
                          experts.shared.used > 0);
      std::vector<Share<T>> shares;
      for (int64_t e = 0; e < experts.count(); e++) {
        const Expert<T> expert = experts.of(e);
        shares.push_back({expert, 0, expert.used, sorted.of(e), sorted.count(e)});
      }
      experts.run_all(shares, begin, end, y_TD);
    }
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
    const TileRegisters registers;
    const Part mine(work[count]);
    float* y_TD = y_PTD + omp_get_thread_num() * tokens * D;
    std::fill(y_TD, y_TD + tokens * D, 0.0f);
    std::vector<Share<T>> shares;
    for (int64_t e = 0; e < count; e++) {
      if (work[e + 1] <= mine.begin || work[e] >= mine.end) continue;
      const Expert<T> expert = experts.of(e);
      const int64_t of_neuron = READ + sorted.count(e);
      const int64_t before = mine.begin - work[e];
      const int64_t until = mine.end - work[e];
      const int64_t from = std::max<int64_t>(0, (before + of_neuron - 1) / of_neuron);
      const int64_t to = std::min<int64_t>(expert.used, (until + of_neuron - 1) / of_neuron);
      shares.push_back({expert, from, to, sorted.of(e), sorted.count(e)});
    }
    experts.run_all(shares, 0, tokens, y_TD);
#pragma omp barrier
    const Part rows(tokens);
    write_rows(y_PTD, rows.begin, rows.end, D, omp_get_num_threads(), tokens * D, out_TD);
  }
}

template <typename T>
void run_experts(const Experts<T>& experts, const int64_t* index_TK, const float* gate_TK,
                 T* out_TD, int64_t tokens, int64_t K, int threads) {
  const int64_t D = experts.D;
  const int64_t split = experts.has_tiles() ? SPLIT_TILED : SPLIT_TOKENS;
  // By neurons weights are read once for so many tokens, by tokens once for each thread.
  const int64_t at_once = std::max<int64_t>(1, MOST_SUMS / (D * threads));
  const bool many = tokens >= split * threads || tokens > at_once * threads;
  static thread_local Lines<float> y;
  const size_t needed = many ? tokens * D : std::min(at_once, tokens) * D * threads;
  if (y.size() < needed) y.resize(needed);
  if (many) {
    by_tokens(experts, index_TK, gate_TK, y.data(), out_TD, tokens, K, threads);
  } else {
    for (int64_t begin = 0; begin < tokens; begin += at_once) {
      Experts<T> of_some = experts;
      of_some.x_TD += begin * D;
      by_neurons(of_some, index_TK + begin * K, gate_TK + begin * K, y.data(),
                 out_TD + begin * D, std::min(at_once, tokens - begin), K, threads);
    }
  }
  if (needed > static_cast<size_t>(MOST_SUMS)) Lines<float>().swap(y);  // of one long prompt
}

// --- the router ------------------------------------------------------------------------

// Scores of experts [from, to) for tokens [begin, end), by rows that lie `apart`.
template <typename T>
void score(const T* x_TD, const T* router_RD, int64_t apart, float* scores_TR, int64_t begin,
           int64_t end, int64_t from, int64_t to, int64_t R, int64_t D) {
  constexpr int N = 4;
  for (int64_t t = begin; t < end; t += N)
    for (int64_t e = from; e < to; e += N) {
      const T* rows[N];
      const T* x[N];
      for (int i = 0; i < N; i++) {
        rows[i] = router_RD + std::min(e + i, to - 1) * apart;
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

// By tiles, where there are some and the tokens fill them.
template <typename T>
bool scored_by_tiles(const T* x_TD, const T* router_RD, float* scores_TR, int64_t begin,
                     int64_t end, int64_t R, int64_t D) {
#if defined(HAS_TILES)
  if constexpr (std::is_same<T, bf16>::value)
    if (tiles_are_there() && D % (2 * LANES) == 0 && end - begin >= TILE) {
      const TileRegisters registers;
      score_tiles(x_TD, router_RD, scores_TR, begin, end, R, D);
      return true;
    }
#endif
  return false;
}

// A whole number for each value, in the same order.
inline Ints keys_of(Floats value) {
  const Ints bits = (Ints)value;
  return bits < Ints{} ? bits ^ 0x7fffffff : bits;
}

// How many of the keys are `least` or more. They fill whole vectors.
inline int64_t count_from(const int32_t* key_R, int64_t R, int32_t least) {
  Ints counts = {};
  for (int64_t e = 0; e < R; e += LANES) {
    Ints keys;
    std::memcpy(&keys, key_R + e, sizeof keys);
    counts -= keys >= Ints{} + least;
  }
  int64_t count = 0;
  for (int i = 0; i < LANES; i++) count += counts[i];
  return count;
}

// A number that K keys reach, or of the keys the K-th largest: bit after bit, from the first.
int32_t least_of_largest(const int32_t* key_R, int64_t R, int64_t K) {
  int64_t least = INT32_MIN;
  for (int bit = 31; bit >= 0; bit--) {
    const int64_t larger = least + (int64_t(1) << bit);
    const int64_t count = count_from(key_R, R, int32_t(larger));
    if (count >= K) least = larger;
    if (count == K) break;
  }
  return int32_t(least);
}

// What a thread keeps of one token's choice, for whole vectors of experts.
struct Choice {
  Lines<float> value_R;
  Lines<int32_t> key_R;

  Choice(int64_t R) : value_R(R + LANES), key_R(R + LANES) {}
};

// Scores by a matrix, or by one neuron of each expert: act(gate x) * (up x), or act(up x)
// without a gate, of which the size alone counts where `absolute`. With directions the
// matrix multiplies the products of their pairs too, z_i z_j for all i <= j, after x.
template <typename T>
struct Router {
  const T* up_RD;    // or the matrix
  const T* gate_RD;  // null where there is none
  const T* direction_CD;
  const T* direction_bias_C;
  const float* bias_R;
  const float* scale_R;
  int64_t R, D, C;
  bool copies;  // of neurons
  bool absolute;
  int activation;

  static bool any(const float* vector, int64_t count) {
    return std::any_of(vector, vector + count, [](float value) { return value != 0; });
  }

  // Scores of experts [from, to) for tokens [begin, end); `gate_TR` is for this alone.
  void score_all(const T* x_TD, float* scores_TR, float* gate_TR, int64_t begin, int64_t end,
                 int64_t from, int64_t to) const {
    products(up_RD, x_TD, scores_TR, begin, end, from, to);
    if (C) add_pairs(x_TD, scores_TR, begin, end, from, to);
    if (!copies) return;
    if (gate_RD) products(gate_RD, x_TD, gate_TR, begin, end, from, to);
    for (int64_t t = begin; t < end; t++)
      for (int64_t e = from; e < to; e += LANES) {
        const int64_t count = std::min<int64_t>(LANES, to - e);
        float* score = scores_TR + t * R + e;
        float* gate = gate_TR + t * R + e;
        const Floats up = load_some(score, count);
        Floats made = gate_RD ? activated(load_some(gate, count), activation) * up
                              : activated(up, activation);
        if (absolute) made = made < Floats{} ? Floats{} - made : made;
        std::memcpy(score, &made, count * sizeof(float));
      }
  }

 private:
  // The first `count` numbers, or a whole vector of them; zeros beyond.
  template <typename N>
  static Floats load_some(const N* from, int64_t count) {
    N some[LANES] = {};
    std::memcpy(some, from, std::min<int64_t>(count, LANES) * sizeof(N));
    return load(some);
  }

  int64_t pairs() const { return C * (C + 1) / 2; }  // of directions

  void products(const T* matrix_RD, const T* x_TD, float* to_TR, int64_t begin, int64_t end,
                int64_t from, int64_t to) const {
    const bool all_experts = from == 0 && to == R;
    if (all_experts && !C && scored_by_tiles(x_TD, matrix_RD, to_TR, begin, end, R, D)) return;
    score(x_TD, matrix_RD, D + pairs(), to_TR, begin, end, from, to, R, D);
  }

  // What the products of directions add to scores.
  void add_pairs(const T* x_TD, float* scores_TR, int64_t begin, int64_t end, int64_t from,
                 int64_t to) const {
    Lines<float> z_TC((end - begin) * C);
    score(x_TD + begin * D, direction_CD, D, z_TC.data(), 0, end - begin, 0, C, C, D);
    // In whole vectors, zeros beyond the last pair.
    const int64_t width = (pairs() + LANES - 1) / LANES * LANES;
    Lines<float> pair_P(width);
    Lines<float> weight_RP((to - from) * width);
    for (int64_t e = from; e < to; e++)
      for (int64_t p = 0; p < pairs(); p += LANES) {
        const T* row_P = up_RD + e * (D + pairs()) + D;
        store(weight_RP.data() + (e - from) * width + p, load_some(row_P + p, pairs() - p));
      }
    for (int64_t t = begin; t < end; t++) {
      float* z_C = z_TC.data() + (t - begin) * C;
      for (int64_t c = 0; c < C; c++) z_C[c] += number(direction_bias_C[c]);
      float* next = pair_P.data();
      for (int64_t i = 0; i < C; i++)
        for (int64_t j = i; j < C; j++) *next++ = z_C[i] * z_C[j];
      for (int64_t e = from; e < to; e += LANES) {
        const int64_t count = std::min<int64_t>(LANES, to - e);
        Floats sums[LANES] = {};
        for (int64_t i = 0; i < count; i++) {
          const float* row_P = weight_RP.data() + (e + i - from) * width;
          for (int64_t p = 0; p < width; p += LANES)
            sums[i] += load(pair_P.data() + p) * load(row_P + p);
        }
        float* of_experts = scores_TR + t * R + e;
        const Floats added = load_some(of_experts, count) + totals(sums);
        std::memcpy(of_experts, &added, count * sizeof(float));
      }
    }
  }
};

// Chooses the K experts of largest score + bias, the first of equal ones, and their gates
// 1 + softmax(scores) * scale. Where `by_probability` the softmax stands for the score.
// Where `by_threshold` only those of them above zero, but always the first: what is left of
// index_K is nobody's.
void choose(const float* scores_R, const float* bias_R, const float* scale_R, bool scaled,
            bool by_probability, bool by_threshold, int64_t R, int64_t K, Choice& choice,
            int64_t* index_K, float* gate_K) {
  float* value_R = choice.value_R.data();
  float most = 0, sum = 1;
  if (scaled || by_probability) {
    most = *std::max_element(scores_R, scores_R + R);
    sum = 0;
    for (int64_t e = 0; e < R; e++) sum += std::exp(scores_R[e] - most);
  }
  const auto probability = [&](int64_t e) { return std::exp(scores_R[e] - most) / sum; };
  for (int64_t e = 0; e < R; e++) {
    const float value = (by_probability ? probability(e) : scores_R[e]) + bias_R[e];
    // What is no number is in no order, and counts as infinity. Zeros are equal.
    value_R[e] = value == value ? value + 0.0f : INFINITY;
  }
  const int64_t first = by_threshold ? std::max_element(value_R, value_R + R) - value_R : 0;
  const auto runs = [&](int64_t e) { return !by_threshold || value_R[e] > 0 || e == first; };
  int64_t count = 0;
  if (K == R) {
    for (int64_t e = 0; e < R; e++)
      if (runs(e)) index_K[count++] = e;
  } else {
    int32_t* key_R = choice.key_R.data();
    for (int64_t e = 0; e < R; e += LANES) {
      const Ints keys = keys_of(load(value_R + e));
      std::memcpy(key_R + e, &keys, sizeof keys);
    }
    std::fill(key_R + R, key_R + R + LANES, INT32_MIN);
    const int32_t least = least_of_largest(key_R, R, K);
    int64_t equal = K - count_from(key_R, R, least + 1);  // the first of those that are equal
    for (int64_t e = 0; e < R; e++) {
      const bool is_chosen = key_R[e] > least || (key_R[e] == least && equal-- > 0);
      if (is_chosen && runs(e)) index_K[count++] = e;
    }
  }
  for (int64_t k = 0; k < count; k++) {
    const int64_t e = index_K[k];
    gate_K[k] = scaled ? 1 + probability(e) * scale_R[e] : 1.0f;
  }
  std::fill(index_K + count, index_K + K, NOBODY);
}

template <typename T>
void route(const Router<T>& router, const T* x_TD, bool by_threshold, int64_t* index_TK,
           float* gate_TK, int64_t tokens, int64_t K, int threads) {
  const int64_t R = router.R;
  const bool scaled = Router<T>::any(router.scale_R, R);
  // By top-k a neuron's copy ranks by probability once a bias is trained.
  const bool by_probability =
      router.copies && !by_threshold && Router<T>::any(router.bias_R, R);
  static thread_local Lines<float> kept;
  const size_t needed = (router.gate_RD ? 2 : 1) * tokens * R;
  kept.resize(needed);
  float* scores_TR = kept.data();
  float* gate_TR = scores_TR + tokens * R;
#pragma omp parallel num_threads(threads)
  {
    const Part rows(tokens);
    if (tokens >= 4 * omp_get_num_threads()) {
      router.score_all(x_TD, scores_TR, gate_TR, rows.begin, rows.end, 0, R);
    } else {
      const Part experts(R);
      router.score_all(x_TD, scores_TR, gate_TR, 0, tokens, experts.begin, experts.end);
    }
#pragma omp barrier
    Choice choice(R);
    for (int64_t t = rows.begin; t < rows.end; t++)
      choose(scores_TR + t * R, router.bias_R, router.scale_R, scaled, by_probability,
             by_threshold, R, K, choice, index_TK + t * K, gate_TK + t * K);
  }
  if (needed > static_cast<size_t>(MOST_SUMS)) Lines<float>().swap(kept);
}

// What Python hands over beside the tokens; an expert's matrices are laid out as
// transformers has them, but W_down, which is (R, M, D) in memory.
struct Call {
  const void* first_RND;
  const void* down_RMD;
  const int64_t* index_TK;  // with gate_TK, where no router is given
  const float* gate_TK;
  const void* router_RD;
  const void* router_gate_RD;
  const void* direction_CD;
  const void* direction_bias_C;
  const float* bias_R;
  const float* scale_R;
  const void* shared_gate_SD;
  const void* shared_up_SD;
  const void* shared_down_SD;
  int64_t K, R, M, used, D, S, C;
  int32_t gated, activation, copies, absolute, by_threshold;
};

template <typename T>
void run_call(const Call& call, const T* x_TD, T* out_TD, int64_t tokens, int threads) {
  const Expert<T> shared{(const T*)call.shared_gate_SD, (const T*)call.shared_up_SD,
                         (const T*)call.shared_down_SD, call.S};
  const Experts<T> experts{x_TD,
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
  Lines<float> gates;
  if (call.router_RD) {
    chosen.resize(tokens * call.K);
    gates.resize(tokens * call.K);
    const Router<T> router{(const T*)call.router_RD,
                           (const T*)call.router_gate_RD,
                           (const T*)call.direction_CD,
                           (const T*)call.direction_bias_C,
                           call.bias_R,
                           call.scale_R,
                           call.R,
                           call.D,
                           call.C,
                           call.copies != 0,
                           call.absolute != 0,
                           call.activation};
    route(router, x_TD, call.by_threshold != 0, chosen.data(), gates.data(), tokens, call.K,
          threads);
    index_TK = chosen.data();
    gate_TK = gates.data();
  }
  run_experts(experts, index_TK, gate_TK, out_TD, tokens, call.K, threads);
}

}  // namespace

extern "C" int32_t moesaic_experts_float32(const Call* call, const void* x_TD, void* out_TD,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_call<float>(*call, (const float*)x_TD, (float*)out_TD, tokens, threads);
  });
}

extern "C" int32_t moesaic_experts_bfloat16(const Call* call, const void* x_TD, void* out_TD,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_call<bf16>(*call, (const bf16*)x_TD, (bf16*)out_TD, tokens, threads);
  });
}

extern "C" int32_t moesaic_has_tiles() { return tiles_are_there(); }
