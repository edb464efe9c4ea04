// The most likely tokens of each row of logits.

#include <cmath>
#include <limits>
#include <tuple>

#include "threads.h"
#include "vectors.h"

// Logits that are worth a thread.
constexpr int64_t GRAIN = 1 << 14;

// The index of the largest of x[size], the first among equals, and that number. If x has a NaN, its index and
// NaN.
static std::pair<int64_t, float> largest(const float* x, int64_t size) {
  constexpr float LEAST = -std::numeric_limits<float>::infinity();

  // The largest number of each lane, and its index.
  Vector most = Vector{} + LEAST;
  Whole indices{}, current{}, is_nan{};
  for (int lane = 0; lane < LANES; ++lane) {
    indices[lane] = lane;
    current[lane] = lane;
  }
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES, current += LANES) {
    const Vector part = *(const Loose*)(x + i);
    const Whole is_more = part > most;
    most = is_more ? part : most;
    indices = is_more ? current : indices;
    is_nan |= part != part;
  }

  // The largest of all lanes, and of the numbers behind the last whole vector.
  int64_t index = 0;
  float number = LEAST;
  bool has_nan = false;
  for (int lane = 0; lane < LANES; ++lane) {
    if (most[lane] > number || (most[lane] == number && indices[lane] < index)) {
      number = most[lane];
      index = indices[lane];
    }
    has_nan = has_nan || is_nan[lane];
  }
  for (int64_t i = whole; i < size; ++i) {
    if (x[i] > number) {
      number = x[i];
      index = i;
    }
    has_nan = has_nan || x[i] != x[i];
  }
  if (has_nan)
    for (index = 0; x[index] == x[index];) ++index;
  return {index, x[index]};
}

// logits [T, V], fp32, contiguous, V up to 2^31 - 1 -> the most likely of each row, int64 [T], and its logit,
// fp32 [T].
static std::tuple<Tensor, Tensor> most_likely(const Tensor& logits) {
  STD_TORCH_CHECK(
      logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) <= INT32_MAX, "not rows of logits");
  const int64_t rows = logits.size(0);
  const int64_t size = logits.size(1);
  const float* from = floats(logits);
  Tensor values = torch::stable::new_empty(logits, {rows});
  Tensor tokens = torch::stable::new_empty(logits, {rows}, torch::headeronly::ScalarType::Long);
  float* best = own_floats(values);
  int64_t* best_tokens = (int64_t*)tokens.mutable_data_ptr();
  Threads::share(rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::tie(best_tokens[t], best[t]) = largest(from + t * size, size);
  });
  return {tokens, values};
}

// Largest k, numbers that are compared together, and terms of a sum in fp32.
constexpr int64_t MAX_TOPK = 16;
constexpr int64_t TOGETHER = 8 * LANES;
constexpr int64_t TERMS = 1024;

// The k largest of x[size], best first, the first ones among equals: their indices, and the numbers
// themselves. A NaN is the least of all.
static void best_of(const float* x, int64_t size, int64_t k, int64_t* indices, float* numbers) {
  int64_t count = 0;
  const auto insert = [&](float number, int64_t index) {
    int64_t i = count < k ? count++ : k - 1;
    for (; i > 0 && !(numbers[i - 1] >= number); --i) {
      numbers[i] = numbers[i - 1];
      indices[i] = indices[i - 1];
    }
    numbers[i] = number;
    indices[i] = index;
  };

  // The first k.
  int64_t next = 0;
  for (; next < k; ++next)
    insert(std::isnan(x[next]) ? -std::numeric_limits<float>::infinity() : x[next], next);

  // The others, of which most groups have no number that is large enough.
  for (; next + TOGETHER <= size; next += TOGETHER) {
    Vector most = *(const Loose*)(x + next);
    for (int64_t i = LANES; i < TOGETHER; i += LANES) {
      const Vector part = *(const Loose*)(x + next + i);
      most = (part > most) ? part : most;
    }
    bool is_more = false;  // also where a NaN hides a larger number
    for (int lane = 0; lane < LANES; ++lane) is_more |= !(most[lane] <= numbers[k - 1]);
    for (int64_t i = next; is_more && i < next + TOGETHER; ++i)
      if (x[i] > numbers[k - 1]) insert(x[i], i);
  }
  for (; next < size; ++next)
    if (x[next] > numbers[k - 1]) insert(x[next], next);
}

// log(sum(exp(x[size] - most))), of which `most` is the largest.
static float log_sum_exp(const float* x, int64_t size, float most) {
  double total = 0.0;
  int64_t i = 0;
  while (i + LANES <= size) {
    Vector sums{};
    for (const int64_t end = std::min(size, i + TERMS); i + LANES <= end; i += LANES)
      sums += exponential(*(const Loose*)(x + i) - most);
    for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
  }
  for (; i < size; ++i) total += std::exp(x[i] - most);
  return (float)std::log(total);
}

// logits [T, V], fp32, contiguous -> the k most likely of each row, int64 [T, k], best first, and their
// log-probabilities, fp32 [T, k], or 0 unless normalized.
static std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, int64_t k, bool normalized) {
  STD_TORCH_CHECK(
      logits.dim() == 2 && k >= 1 && k <= MAX_TOPK && k <= logits.size(1), "not rows of so many logits");
  const int64_t rows = logits.size(0);
  const int64_t size = logits.size(1);
  const float* from = floats(logits);
  Tensor scores = torch::stable::new_empty(logits, {rows, k});
  Tensor tokens = torch::stable::new_empty(logits, {rows, k}, torch::headeronly::ScalarType::Long);
  float* values = own_floats(scores);
  int64_t* ids = (int64_t*)tokens.mutable_data_ptr();
  Threads::share(rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = from + t * size;
      float* row_scores = values + t * k;
      best_of(row, size, k, ids + t * k, row_scores);
      const float most = row_scores[0];
      const float total = normalized ? log_sum_exp(row, size, most) : 0.0f;
      for (int64_t i = 0; i < k; ++i)
        row_scores[i] = normalized ? (row[ids[t * k + i]] - most) - total : 0.0f;
    }
  });
  return {tokens, scores};
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def("most_likely(Tensor logits) -> (Tensor, Tensor)");
  m.def("draft_topk(Tensor logits, int k, bool normalized) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) {
  m.impl("most_likely", TORCH_BOX(&most_likely));
  m.impl("draft_topk", TORCH_BOX(&draft_topk));
}
