// A linear layer on a CPU that reads the columns of its largest inputs only.
//
//     y_t = sum of x_ti column_i, but for the i where abs(x_ti) * scale_i <= threshold, + b
//
// Built on first use (kernels/build.py). Columns lie side by side in memory. For few
// tokens: each reads columns of its own.
//
// Suffixes: T tokens, I inputs, N outputs.

#include "vectors.h"

namespace {

constexpr int64_t ALIGNED = 2 * LANES;  // outputs that threads divide among themselves

// What Python hands over beside the tokens.
struct Call {
  const void* weight_IN;
  const void* bias_N;
  const float* scale_I;
  const float* threshold;
  int64_t I, N;
};

// Inputs of a token that are large enough, and their columns.
template <typename T>
struct Kept {
  std::vector<const T*> columns;
  std::vector<float> x;

  Kept(const T* x_I, const Call& call) {
    const T* weight_IN = (const T*)call.weight_IN;
    const float threshold = *call.threshold;
    columns.reserve(call.I + LANES);
    x.reserve(call.I + LANES);
    for (int64_t i = 0; i < call.I; i++) {
      const float value = number(x_I[i]);
      if (std::fabs(value) * call.scale_I[i] <= threshold) continue;  // NaN counts, and shows
      columns.push_back(weight_IN + i * call.N);
      x.push_back(value);
    }
    // They are taken eight and four at a time.
    while (!columns.empty() && columns.size() % 4 != 0) {
      columns.push_back(columns.back());
      x.push_back(0);
    }
  }

  void add(int64_t begin, int64_t end, float* y) const {
    const size_t count = columns.size();
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
      add_rows<8, 1>(columns.data() + i, begin, end, x.data() + i, &y);
    for (; i < count; i += 4)
      add_rows<4, 1>(columns.data() + i, begin, end, x.data() + i, &y);
  }
};

template <typename T>
void run_linear(const Call& call, const T* x_TI, T* out_TN, int64_t tokens, int threads) {
  const int64_t N = call.N;
#pragma omp parallel num_threads(threads)
  {
    const Part mine((N + ALIGNED - 1) / ALIGNED);
    const int64_t begin = mine.begin * ALIGNED;
    const int64_t end = std::min(mine.end * ALIGNED, N);
    std::vector<float> y(N);
    for (int64_t t = 0; t < tokens; t++) {
      const Kept<T> kept(x_TI + t * call.I, call);
      std::fill(y.begin(), y.end(), 0.0f);
      kept.add(begin, end, y.data());
      for (int64_t n = begin; n < end; n++) {
        const float bias = call.bias_N ? number(((const T*)call.bias_N)[n]) : 0.0f;
        put(out_TN + t * N + n, y[place<T>(n, N)] + bias);
      }
    }
  }
}

}  // namespace

extern "C" int32_t moesaic_linear_float32(const Call* call, const void* x_TI, void* out_TN,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_linear<float>(*call, (const float*)x_TI, (float*)out_TN, tokens, threads);
  });
}

extern "C" int32_t moesaic_linear_bfloat16(const Call* call, const void* x_TI, void* out_TN,
    int64_t tokens, int32_t threads) {
  return has_memory([&] {
    run_linear<bf16>(*call, (const bf16*)x_TI, (bf16*)out_TN, tokens, threads);
  });
}
