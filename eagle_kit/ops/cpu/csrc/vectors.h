// Vectors of the processor, and matrix products of a few rows, each of whose elements is one sum in the order
// of its terms: among finite numbers its bits depend on no other row, on no number of rows and on no thread.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

// Numbers of a vector of the processor, and rows of two vectors of sums that fit into its registers.
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int ROWS = 14;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int ROWS = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int ROWS = 12;
#else
constexpr int LANES = 4;
constexpr int ROWS = 6;
#endif
// Bytes of a line of the cache.
constexpr int LINE = 64;
// Columns of a panel.
constexpr int PANEL = 2 * LANES;
// Terms by which a weight is prefetched ahead of its use.
constexpr int64_t AHEAD = 128;
// Terms that several blocks of rows share: in fp32 with AVX-512 two such chunks and the rows' numbers take 30
// of a first cache's 48 KiB.
constexpr int64_t CHUNK = 96;
// Number of these blocks, the first ones, during which the next chunk is prefetched.
constexpr int64_t FETCHING = 4;

// Vectors of numbers: aligned, at any address, of int32, and of bits at any address.
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseBits __attribute__((vector_size(4 * LANES), aligned(2)));

using torch::stable::Tensor;

// Floats of a contiguous tensor.
static inline const float* floats(const Tensor& x) {
  STD_TORCH_CHECK(
      x.scalar_type() == torch::headeronly::ScalarType::Float && x.is_contiguous(), "not contiguous fp32");
  return (const float*)x.const_data_ptr();
}
static inline const float* floats(const std::optional<Tensor>& x) { return x ? floats(*x) : nullptr; }
static inline float* own_floats(const Tensor& x) { return (float*)x.mutable_data_ptr(); }

// Integers of a contiguous tensor.
static inline const int64_t* numbers(const Tensor& x) {
  STD_TORCH_CHECK(
      x.scalar_type() == torch::headeronly::ScalarType::Long && x.is_contiguous(), "not contiguous int64");
  return (const int64_t*)x.const_data_ptr();
}

// The two vectors of PANEL numbers: one behind the other in fp32; in bfloat16 their numbers alternate.
static inline void load_both(const float* w, Vector& left, Vector& right) {
  left = *(const Loose*)w;
  right = *(const Loose*)(w + LANES);
}
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first of two numbers is the lower half");
static inline void load_both(const uint16_t* w, Vector& left, Vector& right) {
  const LooseBits pairs = *(const LooseBits*)w;
  left = (Vector)(pairs << 16);
  right = (Vector)(pairs & 0xffff0000u);
}

// exp(x) for x <= 0 to a rounding error or two, 0 below -87; NaN stays.
static inline Vector exponential(Vector x) {
  // x = n log(2) + r, with n the nearest integer, at least -126.
  const Vector n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vector clamped = (n < -126.0f) ? (Vector{} - 126.0f) : n;
  const Vector r = (x - clamped * 0.693359375f) - clamped * -2.12194440e-4f;

  // exp(r) by a polynomial, times 2^n by its bits.
  Vector p = Vector{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Whole power = (__builtin_convertvector(clamped, Whole) + 127) << 23;
  const Vector result = p * (Vector)power;
  return (x < -87.0f) ? Vector{} : result;
}

// Keep two vectors in registers: otherwise the compiler may read them again for every row.
static inline __attribute__((always_inline)) void keep_in_registers(Vector& left, Vector& right) {
#if defined(__aarch64__)
  asm("" : "+w"(left), "+w"(right));
#elif defined(__AVX512F__)
  asm("" : "+v"(left), "+v"(right));
#elif defined(__x86_64__)
  asm("" : "+x"(left), "+x"(right));
#endif
}

// y[M, PANEL] += x[M, terms] w[terms, PANEL]; ld are strides of rows. Meanwhile FETCHED numbers are
// prefetched for every term, for the first one from `ahead` on, for each next one `step` numbers further.
template <int M, int FETCHED, typename Number>
static inline __attribute__((always_inline)) void multiply_block(
    const float* __restrict x, int64_t ldx, const Number* __restrict w, int64_t ldw, int64_t terms,
    float* __restrict y, int64_t ldy, const Number* ahead, int64_t step) {
  // Pointers to every third row, which leaves registers for all of them.
  Vector left[M];
  Vector right[M];
  const float* third[(M + 2) / 3];
#pragma GCC unroll 16
  for (int i = 0; i < (M + 2) / 3; ++i) {
    third[i] = x + 3 * i * ldx;
    asm("" : "+r"(third[i]));  // otherwise the compiler keeps a pointer for each row, some in memory
  }

  // Load the sums, add a term at a time, and store them.
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    left[m] = *(const Loose*)(y + m * ldy);
    right[m] = *(const Loose*)(y + m * ldy + LANES);
  }
  for (int64_t k = 0; k < terms; ++k) {
    for (int i = 0; i < FETCHED; i += LINE / sizeof(Number)) __builtin_prefetch(ahead + k * step + i);
    Vector a;
    Vector b;
    load_both(w + k * ldw, a, b);
    keep_in_registers(a, b);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float factor = third[m / 3][m % 3 * ldx + k];
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

// multiply_block of `rows` rows, at most M.
template <int M, int FETCHED, typename Number>
static inline void multiply_up_to(
    int64_t rows, const float* x, int64_t ldx, const Number* w, int64_t ldw, int64_t terms, float* y,
    int64_t ldy, const Number* ahead, int64_t step) {
  if constexpr (M > 0) {
    if (rows == M) return multiply_block<M, FETCHED>(x, ldx, w, ldw, terms, y, ldy, ahead, step);
    multiply_up_to<M - 1, FETCHED>(rows, x, ldx, w, ldw, terms, y, ldy, ahead, step);
  }
}

// Number of blocks of at most ROWS rows, and rows of the next block if `left` blocks are left for `rows`.
static inline int64_t num_blocks(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static inline int64_t block_rows(int64_t rows, int64_t left) { return (rows + left - 1) / left; }

// y[rows, PANEL] += x[rows, terms] w[terms, PANEL]; numbers from `ahead` on, if any, are prefetched.
static inline void multiply_panel(
    int64_t rows, const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t terms, float* y,
    int64_t ldy, const float* ahead = nullptr, int64_t step = 0) {
  for (int64_t m = 0, left = num_blocks(rows); left; --left) {
    const int64_t count = block_rows(rows - m, left);
    const auto multiply =
        ahead && m == 0 ? multiply_up_to<ROWS, PANEL, float> : multiply_up_to<ROWS, 0, float>;
    multiply(count, x + m * ldx, ldx, w, ldw, terms, y + m * ldy, ldy, ahead, step);
    m += count;
  }
}

// The same for a contiguous `w` that is read from memory, with the next one behind it. Several blocks of rows
// share chunks of terms, which stay in the first cache, and prefetch the next chunk.
template <typename Number>
static inline void multiply_streamed(
    int64_t rows, const float* x, int64_t ldx, const Number* w, int64_t terms, float* y, int64_t ldy) {
  constexpr int PER_LINE = LINE / sizeof(Number);
  const int64_t blocks = num_blocks(rows);
  const int64_t fetching = std::min(blocks, FETCHING);
  if (blocks <= 1)
    return multiply_up_to<ROWS, PANEL>(rows, x, ldx, w, PANEL, terms, y, ldy, w + AHEAD * PANEL, PANEL);
  const int64_t step = (PANEL + fetching - 1) / fetching;
  for (int64_t k = 0; k < terms; k += CHUNK) {
    const int64_t chunk = std::min(CHUNK, terms - k);
    const Number* part = w + k * PANEL;
    const Number* next = part + chunk * PANEL;
    for (int64_t m = 0, block = 0; block < blocks; ++block) {
      const int64_t count = block_rows(rows - m, blocks - block);
      const Number* ahead = next + block * chunk * step;
      const auto multiply =
          block < fetching ? multiply_up_to<ROWS, PER_LINE, Number> : multiply_up_to<ROWS, 0, Number>;
      multiply(count, x + m * ldx + k, ldx, part, PANEL, chunk, y + m * ldy, ldy, ahead, step);
      m += count;
    }
  }
}
