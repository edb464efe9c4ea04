// Linear layers over few rows: y = x w^T + b with weights in panels of PANEL outputs.

#include <vector>

#include "threads.h"
#include "vectors.h"

// Multiply-adds from which on another thread is worth its start.
constexpr int64_t GRAIN = 1 << 16;

static int64_t panel_width() { return PANEL; }

// out [rows, outputs] = x [rows, inputs] times the weight in `panels`, plus `biases`, which may be null.
template <typename Number>
static void multiply(
    const float* x, int64_t rows, int64_t inputs, const Number* panels, const float* biases, int64_t outputs,
    float* out) {
  const int64_t count = (outputs + PANEL - 1) / PANEL;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, rows * inputs * PANEL));
  Threads::share(count, grain, [&](int64_t begin, int64_t end) {
    // Sums of a panel: in the result, rows of two threads can share a line of the cache.
    static thread_local std::vector<float> sums;
    sums.resize(rows * PANEL);
    for (int64_t panel = begin; panel < end; ++panel) {
      // Every sum begins with its bias.
      const int64_t column = panel * PANEL;
      const int64_t width = std::min<int64_t>(PANEL, outputs - column);
      float start[PANEL] = {};
      if (biases) std::copy_n(biases + column, width, start);
      for (int64_t m = 0; m < rows; ++m) std::copy_n(start, PANEL, sums.data() + m * PANEL);

      // Multiply, and copy the outputs that there are.
      multiply_streamed(rows, x, inputs, panels + panel * inputs * PANEL, inputs, sums.data(), PANEL);
      for (int64_t m = 0; m < rows; ++m)
        std::copy_n(sums.data() + m * PANEL, width, out + m * outputs + column);
    }
  });
}

// x [T, K] and bias [N] or none, fp32, panels [ceil(N / PANEL), K, PANEL], fp32 or bfloat16, all contiguous
// -> [T, N], with the same bits from panels of either type.
static Tensor linear(
    const Tensor& x, const Tensor& panels, int64_t outputs, const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0);
  const int64_t inputs = x.size(1);
  STD_TORCH_CHECK(
      x.dim() == 2 && panels.dim() == 3 && panels.size(1) == inputs && panels.size(2) == PANEL &&
          panels.size(0) == (outputs + PANEL - 1) / PANEL && (!bias || bias->numel() == outputs),
      "rows and weight do not fit");
  Tensor out = torch::stable::new_empty(x, {rows, outputs});
  if (panels.scalar_type() == torch::headeronly::ScalarType::BFloat16 && panels.is_contiguous())
    multiply(
        floats(x), rows, inputs, (const uint16_t*)panels.const_data_ptr(), floats(bias), outputs,
        own_floats(out));
  else
    multiply(floats(x), rows, inputs, floats(panels), floats(bias), outputs, own_floats(out));
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def("panel_width() -> int");
  m.def("linear(Tensor x, Tensor panels, int outputs, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CompositeExplicitAutograd, m) {
  m.impl("panel_width", TORCH_BOX(&panel_width));
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) { m.impl("linear", TORCH_BOX(&linear)); }
