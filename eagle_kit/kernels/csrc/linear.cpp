// Linear layers over few rows: y = x w^T + b with weights in panels of PANEL outputs.

#include "vectors.h"

// Multiply-adds that are worth a thread.
constexpr int64_t GRAIN = 1 << 16;

static int64_t panel_width() { return PANEL; }

// x [T, K], panels [ceil(N / PANEL), K, PANEL], bias [N] or none -> [T, N], all fp32 and contiguous.
static Tensor linear(
    const Tensor& x, const Tensor& panels, int64_t outputs, const std::optional<Tensor>& bias) {
  const int64_t rows = x.size(0), inputs = x.size(1), count = panels.size(0);
  STD_TORCH_CHECK(
      x.dim() == 2 && panels.dim() == 3 && panels.size(1) == inputs && panels.size(2) == PANEL &&
          count == (outputs + PANEL - 1) / PANEL && (!bias || bias->numel() == outputs),
      "rows and weight do not fit");
  const float *from = floats(x), *weights = floats(panels), *biases = floats(bias);
  Tensor out = torch::stable::new_empty(x, {rows, outputs});
  float* to = own_floats(out);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, rows * inputs * PANEL));

  const auto multiply = [&](int64_t panel, int64_t first, int64_t many, float* y, int64_t ldy) {
    const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, outputs - column);
    for (int64_t m = 0; m < many; ++m)
      for (int64_t c = 0; c < PANEL; ++c) y[m * ldy + c] = biases && c < width ? biases[column + c] : 0.0f;
    multiply_panel(
        many, from + first * inputs, inputs, weights + panel * inputs * PANEL, PANEL, inputs, y, ldy);
  };
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, outputs - column);
      if (width == PANEL) {
        multiply(panel, 0, rows, to + column, outputs);
        continue;
      }
      float part[ROWS * PANEL];  // the last panel is wider than what is left of the outputs
      for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t many = std::min<int64_t>(ROWS, rows - first);
        multiply(panel, first, many, part, PANEL);
        for (int64_t m = 0; m < many; ++m)
          std::copy_n(part + m * PANEL, width, to + (first + m) * outputs + column);
      }
    }
  });
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
