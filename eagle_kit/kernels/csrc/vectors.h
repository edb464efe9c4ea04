// Vectors of the processor, and matrix products of a few rows, each of whose elements is one sum in the order
// of its terms: among finite numbers its bits depend on no other row, on no number of rows and on no thread.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 12;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
// Columns of a panel; ROWS rows of two vectors of sums fit into the registers.
constexpr int PANEL = 2 * LANES;
// Terms by which weights are fetched ahead of their use.
constexpr int AHEAD = 32;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));

using torch::stable::Tensor;

// Floats of a contiguous tensor.
static inline const float* floats(const Tensor& x) {
  STD_TORCH_CHECK(
      x.scalar_type() == torch::headeronly::ScalarType::Float && x.is_contiguous(), "not contiguous fp32");
  return (const float*)x.const_data_ptr();
}
static inline const float* floats(const std::optional<Tensor>& x) { return x ? floats(*x) : nullptr; }
static inline float* own_floats(const Tensor& x) { return (float*)x.mutable_data_ptr(); }

// Whole numbers of a contiguous tensor.
static inline const int64_t* numbers(const Tensor& x) {
  STD_TORCH_CHECK(
      x.scalar_type() == torch::headeronly::ScalarType::Long && x.is_contiguous(), "not contiguous int64");
  return (const int64_t*)x.const_data_ptr();
}

// exp(x) for x <= 0 to a rounding error or two, 0 below -87; NaN stays.
static inline Vector exponential(Vector x) {
  const Vector n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest whole number
  const Vector held = (n < -126.0f) ? (Vector{} - 126.0f) : n;
  const Vector r = (x - held * 0.693359375f) - held * -2.12194440e-4f;
  Vector p = Vector{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Whole power = (__builtin_convertvector(held, Whole) + 127) << 23;
  const Vector result = p * (Vector)power;
  return (x < -87.0f) ? Vector{} : result;
}

// y[M, PANEL] += x[M, terms] w[terms, PANEL]; ld are the distances of rows.
template <int M>
static inline __attribute__((always_inline)) void multiply_block(
    const float* __restrict x, int64_t ldx, const float* __restrict w, int64_t ldw, int64_t terms,
    float* __restrict y, int64_t ldy) {
  Vector left[M], right[M];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    left[m] = *(const Loose*)(y + m * ldy);
    right[m] = *(const Loose*)(y + m * ldy + LANES);
  }
  for (int64_t k = 0; k < terms; ++k) {
    __builtin_prefetch(w + (k + AHEAD) * ldw);
    const Vector a = *(const Loose*)(w + k * ldw), b = *(const Loose*)(w + k * ldw + LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float factor = x[m * ldx + k];
      left[m] += factor * a;
      right[m] += factor * b;
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    *(Loose*)(y + m * ldy) = left[m];
    *(Loose*)(y + m * ldy + LANES) = right[m];
  }
}

template <int M>
static inline void multiply_up_to(
    int64_t rows, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t terms, float* y,
    int64_t ldy) {
  if constexpr (M > 0) {
    if (rows == M) return multiply_block<M>(x, ldx, w, ldw, terms, y, ldy);
    multiply_up_to<M - 1>(rows, x, ldx, w, ldw, terms, y, ldy);
  }
}

// y[rows, PANEL] += x[rows, terms] w[terms, PANEL].
static inline void multiply_panel(
    int64_t rows, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t terms, float* y,
    int64_t ldy) {
  const int64_t blocks = (rows + ROWS - 1) / ROWS, most = blocks ? (rows + blocks - 1) / blocks : 0;
  for (int64_t m = 0; m < rows; m += most)
    multiply_up_to<ROWS>(std::min(most, rows - m), x + m * ldx, ldx, w, ldw, terms, y + m * ldy, ldy);
}
