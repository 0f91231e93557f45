// Routed experts on a CPU: every chosen expert of every token, in one call.
//
//     y_t = sum over chosen e of gate_te * Down_e (act(Gate_e x_t) * (Up_e x_t))
//
// Built on first use (kernels/build.py). Few tokens are taken six at a time, so that a row
// of weights is read once for six, and neurons in groups that stay in the cache. Many are
// taken as panels of up to 64 (panels.h).
//
// Suffixes: T tokens, K experts of a token, R experts, M neurons of one as they are
// stored, D hidden size.

#include "panels.h"

#include <type_traits>

namespace {

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
constexpr int PANEL_GROUP = 128;   // neurons whose h are made before panels use them
constexpr int64_t TOGETHER = 256;  // tokens in panels that share weights in a cache
constexpr int64_t MOST_SUMS = 1 << 24;  // that all threads together keep
constexpr int64_t SPLIT_TOKENS = 64;  // of each thread, from where threads share tokens out

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

  // h of neurons [from, to), times the gates of their tokens, as units.
  template <int V>
  void panel_neurons(const Expert<T>& expert, int64_t from, int64_t to,
                     const int32_t* x_UL, const float* gate_L, int32_t* h_UL) const {
    constexpr int ROWS = rows_beside(V);
    constexpr int MOST = 2 * GROUP + ROWS;
    const T* rows[MOST];
    float products[MOST * PANEL];
    for (int64_t start = from; start < to; start += GROUP) {
      const int count = int(std::min<int64_t>(GROUP, to - start));
      const int needed = gated ? 2 * count : count;
      for (int m = 0; m < count; m++) {
        rows[m] = expert.up_MD + (start + m) * D;
        if (gated) rows[count + m] = expert.gate_MD + (start + m) * D;
      }
      for (int r = 0; r < ROWS; r++) rows[needed + r] = rows[needed - 1];
      for (int r = 0; r < needed; r += ROWS)
        panel_dots<ROWS, V>(rows + r, x_UL, D, products + r * PANEL);
      const auto h_of = [&](int m, int lane) {
        if (m >= count) return all(0.0f);
        const Floats up = load(products + m * PANEL + lane);
        const float* gate = products + (count + m) * PANEL + lane;
        const Floats made =
            gated ? activated(load(gate), activation) * up : activated(up, activation);
        return made * load(gate_L + lane);
      };
      for (int m = 0; m < count; m += Unit<T>::numbers) {
        for (int lane = 0; lane < V * LANES; lane += LANES) {
          const Ints units = Unit<T>::make(h_of(m, lane), h_of(m + 1, lane));
          std::memcpy(h_UL + lane, &units, sizeof units);
        }
        h_UL += PANEL;
      }
    }
  }

  // Tokens side by side, and neurons [from, to) of their expert.
  template <int V>
  void panel(const Expert<T>& expert, int64_t from, int64_t to, const int32_t* x_UL,
             const float* gate_L, float* const* y, int count) const {
    int32_t h_UL[PANEL_GROUP / Unit<T>::numbers * PANEL];
    panel_neurons<V>(expert, from, to, x_UL, gate_L, h_UL);
    constexpr int N = PANEL_TOKENS;
    const T* rows = expert.down_MD + from * D;
    const int neurons = int(to - from);
    int64_t i = 0;
    for (; i + WIDE * LANES <= D; i += WIDE * LANES)
      for (int t = 0; t < count; t += N)
        panel_add<N, WIDE>(rows, D, neurons, i, h_UL + t, y + t);
    for (; i < D; i += REST * LANES)
      for (int t = 0; t < count; t += N)
        panel_add<N, REST>(rows, D, neurons, i, h_UL + t, y + t);
  }

  // Neurons [from, to) of one expert, for at most TOGETHER of its tokens.
  void run_together(const Expert<T>& expert, int64_t from, int64_t to, const Pair* pairs,
                    int64_t count, float* y_TD) const {
    const int64_t units = D / Unit<T>::numbers;
    static thread_local std::vector<int32_t> panels;
    static thread_local std::vector<float> nobody;  // y of lanes without a token
    panels.resize(units * TOGETHER);
    nobody.resize(D);
    float gate_L[TOGETHER] = {};
    float* y[TOGETHER];
    const T* x[TOGETHER];
    for (int64_t t = 0; t < TOGETHER; t++) {
      const Pair& pair = pairs[std::min(t, count - 1)];
      x[t] = x_TD + pair.token * D;
      y[t] = t < count ? y_TD + pair.token * D : nobody.data();
      if (t < count) gate_L[t] = pair.gate;
    }
    const auto tokens_of = [&](int64_t begin) {
      return int(std::min<int64_t>(PANEL, count - begin));
    };
    const auto vectors_of = [&](int64_t begin) {
      return (tokens_of(begin) + LANES - 1) / LANES;
    };
    for (int64_t begin = 0; begin < count; begin += PANEL)
      fill_panel(x + begin, vectors_of(begin) * LANES, D, panels.data() + begin * units);
    for (int64_t start = from; start < to; start += PANEL_GROUP) {
      const int64_t end = std::min<int64_t>(start + PANEL_GROUP, to);
      for (int64_t begin = 0; begin < count; begin += PANEL) {
        const auto run_panel = [&](auto vectors) {
          constexpr int V = std::min(decltype(vectors)::value, MOST_VECTORS);
          panel<V>(expert, start, end, panels.data() + begin * units, gate_L + begin,
                   y + begin, tokens_of(begin));
        };
        switch (vectors_of(begin)) {
          case 4: run_panel(std::integral_constant<int, 4>()); break;
          case 3: run_panel(std::integral_constant<int, 3>()); break;
          case 2: run_panel(std::integral_constant<int, 2>()); break;
          case 1: run_panel(std::integral_constant<int, 1>()); break;
        }
      }
    }
  }

  // How many of an expert's tokens run as panels: all but a few that would leave most of a
  // vector empty.
  int64_t in_panels(int64_t count) const {
    if (D % (2 * LANES) != 0) return 0;
    const int64_t rest = count % LANES;
    return rest <= FEW ? count - rest : count;
  }

  // Neurons [from, to) of one expert, for all of its tokens.
  void run(int64_t number, int64_t from, int64_t to, const Pair* pairs, int64_t count,
           float* y_TD) const {
    const Expert<T> expert = of(number);
    const int64_t many = in_panels(count);
    for (int64_t first = 0; first < many; first += TOGETHER)
      run_together(expert, from, to, pairs + first, std::min(TOGETHER, many - first), y_TD);
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
