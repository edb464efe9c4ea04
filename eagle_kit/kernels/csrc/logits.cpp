// The most likely token of each row of logits.

#include <limits>
#include <tuple>

#include "threads.h"
#include "vectors.h"

// Logits that are worth a thread.
constexpr int64_t GRAIN = 1 << 14;

// The place of the largest of x[size], the first among equals, and that number: NaN, and its place, where
// there is one.
static std::pair<int64_t, float> largest(const float* x, int64_t size) {
  constexpr float LEAST = -std::numeric_limits<float>::infinity();
  Vector most = Vector{} + LEAST;
  Whole places{}, now{}, is_odd{};
  for (int lane = 0; lane < LANES; ++lane) places[lane] = now[lane] = lane;
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES, now += LANES) {
    const Vector part = *(const Loose*)(x + i);
    const Whole is_more = part > most;
    most = is_more ? part : most;
    places = is_more ? now : places;
    is_odd |= part != part;
  }
  int64_t place = 0;
  float found = whole ? LEAST : x[0];
  bool has_odd = false;
  for (int lane = 0; lane < LANES && whole; ++lane) {
    if (most[lane] > found || (most[lane] == found && places[lane] < place))
      found = most[lane], place = places[lane];
    has_odd = has_odd || is_odd[lane];
  }
  for (int64_t i = whole; i < size; ++i) {
    if (x[i] > found) found = x[i], place = i;
    has_odd = has_odd || x[i] != x[i];
  }
  if (has_odd)
    for (place = 0; x[place] == x[place];) ++place;
  return {place, x[place]};
}

// logits [T, V], fp32, contiguous, V up to 2^31 - 1 -> the most likely of each row, int64 [T], and its logit,
// fp32 [T].
static std::tuple<Tensor, Tensor> most_likely(const Tensor& logits) {
  STD_TORCH_CHECK(
      logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) <= INT32_MAX, "not rows of logits");
  const int64_t rows = logits.size(0), size = logits.size(1);
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

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) { m.def("most_likely(Tensor logits) -> (Tensor, Tensor)"); }

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) { m.impl("most_likely", TORCH_BOX(&most_likely)); }
