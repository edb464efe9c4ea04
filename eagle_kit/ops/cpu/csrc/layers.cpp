// What lies between linear layers: RMSNorm, SwiGLU, rotary positions with the store of keys and values, and
// what follows a window, the commit of its rows.

#include <cmath>
#include <tuple>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Elements that are worth a thread.
constexpr int64_t GRAIN = 1 << 14;

// y[size] = x / sqrt(mean(x^2) + eps) weight
static void norm_row(const float* x, const float* weight, int64_t size, float eps, float* y) {
  Vector sums{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const Vector part = *(const Loose*)(x + i);
    sums += part * part;
  }
  float total = 0.0f;
  for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / size + eps);
  for (i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

static int64_t norm_size(const Tensor& x, const Tensor& weight) {
  const int64_t size = x.size(x.dim() - 1);
  STD_TORCH_CHECK(
      weight.dim() == 1 && weight.size(0) == size && size > 0, "x and the weight of its norm do not fit");
  return size;
}

// x [..., H], weight [H], both contiguous -> the norm.
static Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const int64_t size = norm_size(x, weight), rows = x.numel() / size;
  const float *from = floats(x), *factors = floats(weight);
  Tensor out = torch::stable::empty_like(x);
  float* to = own_floats(out);
  Threads::share(rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) norm_row(from + t * size, factors, size, (float)eps, to + t * size);
  });
  return out;
}

// x and residual [..., H] -> the norm of their sum, and the sum.
static std::tuple<Tensor, Tensor> add_rms_norm(
    const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  const int64_t size = norm_size(x, weight), rows = x.numel() / size;
  STD_TORCH_CHECK(residual.numel() == x.numel(), "x and residual differ in size");
  const float *a = floats(x), *b = floats(residual), *factors = floats(weight);
  Tensor out = torch::stable::empty_like(x), sum = torch::stable::empty_like(x);
  float *to = own_floats(out), *total = own_floats(sum);
  Threads::share(rows, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = t * size; i < (t + 1) * size; ++i) total[i] = a[i] + b[i];
      norm_row(total + t * size, factors, size, (float)eps, to + t * size);
    }
  });
  return {out, sum};
}

// silu(gate) up
static Vector gated(Vector gate, Vector up) {
  const Vector small = exponential((gate < 0.0f) ? gate : -gate);  // exp(-|gate|)
  return gate * (((gate < 0.0f) ? small : Vector{} + 1.0f) / (1.0f + small)) * up;
}

// gate_up [T, 2 I] contiguous, the gate first -> silu(gate) up [T, I].
static Tensor swiglu(const Tensor& gate_up) {
  STD_TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "not gate and up");
  const int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2, whole = size / LANES * LANES;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, size));
  const float* from = floats(gate_up);
  Tensor out = torch::stable::new_empty(gate_up, {rows, size});
  float* to = own_floats(out);
  Threads::share(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *gate = from + 2 * t * size, *up = gate + size;
      float* y = to + t * size;
      for (int64_t i = 0; i < whole; i += LANES)
        *(Loose*)(y + i) = gated(*(const Loose*)(gate + i), *(const Loose*)(up + i));
      float rest[2][LANES] = {};
      std::copy_n(gate + whole, size - whole, rest[0]);
      std::copy_n(up + whole, size - whole, rest[1]);
      *(Loose*)rest[0] = gated(*(Loose*)rest[0], *(Loose*)rest[1]);
      std::copy_n(rest[0], size - whole, y + whole);
    }
  });
  return out;
}

// y[E] = x cos + (x with its pairs swapped) sin, the others copied; x and y apart.
static void rotate(
    const float* x, const float* cos, const float* sin, int64_t rotated, int64_t size, bool interleaved,
    float* y) {
  const int64_t half = rotated / 2;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = std::fma(b, sin[i], a * cos[i]);
      y[2 * i + 1] = std::fma(a, sin[half + i], b * cos[half + i]);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) y[i] = std::fma(x[half + i], sin[i], x[i] * cos[i]);
    for (int64_t i = half; i < rotated; ++i) y[i] = std::fma(x[i - half], sin[i], x[i] * cos[i]);
  }
  std::copy(x + rotated, x + size, y + rotated);
}

// positions [T], inv_freq [E / 2] -> cosines (c, c) and signed sines (-s, s), [T, 1, E]. One of each takes as
// long as some 32 other elements.
static std::tuple<Tensor, Tensor> rotation_table(
    const Tensor& positions, const Tensor& inv_freq, double magnitude) {
  const int64_t count = positions.numel(), half = inv_freq.numel(), *at = numbers(positions);
  const float* frequencies = floats(inv_freq);
  Tensor cos = torch::stable::new_empty(inv_freq, {count, 1, 2 * half});
  Tensor sin = torch::stable::new_empty(inv_freq, {count, 1, 2 * half});
  float *cosines = own_floats(cos), *sines = own_floats(sin);
  Threads::share(
      count, std::max<int64_t>(1, GRAIN / 32 / std::max<int64_t>(1, half)), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          for (int64_t i = 0; i < half; ++i) {
            const float angle = (float)at[t] * frequencies[i];
            const float c = std::cos(angle) * (float)magnitude, s = std::sin(angle) * (float)magnitude;
            float *to = cosines + 2 * t * half + i, *also = sines + 2 * t * half + i;
            to[0] = to[half] = c, also[0] = -s, also[half] = s;
          }
      });
  return {cos, sin};
}

// Rows [T] of a store [Hkv, R, D] that keys or values are written to.
struct Store {
  float* rows = nullptr;
  int64_t head = 0, row = 0;
  Store(
      const std::optional<Tensor>& store, const std::optional<Tensor>& at, int64_t count, int64_t others,
      int64_t size) {
    STD_TORCH_CHECK(store.has_value() == at.has_value(), "stores and rows are given together");
    if (!store) return;
    STD_TORCH_CHECK(
        store->scalar_type() == torch::headeronly::ScalarType::Float && store->dim() == 3 &&
            store->stride(2) == 1 && store->size(0) == others && store->size(2) == size &&
            at->numel() == count,
        "keys do not fit their store");
    const int64_t *given = numbers(*at), held = store->size(1);
    for (int64_t t = 0; t < count; ++t)
      STD_TORCH_CHECK(given[t] >= 0 && given[t] < held, "a row is not in the store");
    rows = own_floats(*store), head = store->stride(0), row = store->stride(1);
  }
};

// qkv [T, Hq + 2 Hkv, D], cos and sin [T, 1, E] -> q [T, Hq, D], k and v [T, Hkv, D], or [0, Hkv, D] unless
// returned; k and v are also written to rows [T] of the stores [Hkv, R, D].
static std::tuple<Tensor, Tensor, Tensor> rope_store(
    const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads,
    const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps, bool interleaved,
    const std::optional<Tensor>& k_rows, const std::optional<Tensor>& v_rows,
    const std::optional<Tensor>& rows, bool returns_kv) {
  const int64_t count = qkv.size(0), all = qkv.size(1), size = qkv.size(2), rotated = cos.size(2);
  const int64_t others = (all - heads) / 2, returned = returns_kv ? count : 0;
  STD_TORCH_CHECK(
      cos.numel() == count * rotated && sin.numel() == cos.numel() && rotated <= size && rotated % 2 == 0 &&
          (!q_norm || (q_norm->numel() == size && k_norm->numel() == size)),
      "heads, positions and norms do not fit");
  const float *from = floats(qkv), *cosines = floats(cos), *sines = floats(sin);
  const float *q_weight = floats(q_norm), *k_weight = floats(k_norm);
  const Store key_store(k_rows, rows, count, others, size), value_store(v_rows, rows, count, others, size);
  const int64_t* at = rows ? numbers(*rows) : nullptr;
  Tensor q = torch::stable::new_empty(qkv, {count, heads, size});
  Tensor k = torch::stable::new_empty(qkv, {returned, others, size});
  Tensor v = torch::stable::new_empty(qkv, {returned, others, size});
  float *queries = own_floats(q), *keys = own_floats(k), *values = own_floats(v);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, all * size));
  Threads::share(count, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> normed(size), turned(size);
    for (int64_t t = begin; t < end; ++t)
      for (int64_t head = 0; head < all; ++head) {
        const float* x = from + (t * all + head) * size;
        const bool is_query = head < heads, is_value = head >= heads + others;
        if (!is_value) {
          if (const float* weight = is_query ? q_weight : k_weight) {
            norm_row(x, weight, size, (float)eps, normed.data());
            x = normed.data();
          }
          float* to = is_query ? queries + (t * heads + head) * size : turned.data();
          rotate(x, cosines + t * rotated, sines + t * rotated, rotated, size, interleaved, to);
          x = to;
        }
        if (is_query) continue;
        const int64_t mine = (head - heads) % others;
        if (returns_kv) std::copy_n(x, size, (is_value ? values : keys) + (t * others + mine) * size);
        const Store& store = is_value ? value_store : key_store;
        if (store.rows) std::copy_n(x, size, store.rows + mine * store.head + at[t] * store.row);
      }
  });
  return {q, k, v};
}

// Copy rows of windows in a store [..., R, D] to the positions behind `first` [B], the first `counts` [B] of
// the nodes [B, n] of each: node j of request b is row scratch + b * stride + j.
static void commit_rows(
    const Tensor& store, const Tensor& page_table, int64_t page_size, const Tensor& nodes,
    const Tensor& first, const Tensor& counts, int64_t scratch, int64_t stride) {
  const int64_t batch = nodes.size(0), most = nodes.size(1), pages = page_table.size(1);
  const int64_t size = store.size(store.dim() - 1), held = store.size(store.dim() - 2);
  STD_TORCH_CHECK(
      page_table.size(0) == batch && first.numel() == batch && counts.numel() == batch && size > 0 &&
          held > 0 && page_size > 0,
      "windows and their requests do not fit");
  const int64_t *tables = numbers(page_table), *node = numbers(nodes), *from = numbers(first),
                *many = numbers(counts);
  std::vector<std::pair<int64_t, int64_t>> copies;  // from row to row
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < std::min(many[b], most); ++i) {
      const int64_t position = from[b] + i, page = position / page_size;
      STD_TORCH_CHECK(position >= 0 && page < pages, "a position has no page");
      const int64_t source = scratch + b * stride + node[b * most + i];
      const int64_t target = tables[b * pages + page] * page_size + position % page_size;
      STD_TORCH_CHECK(
          node[b * most + i] >= 0 && source >= 0 && source < held && target >= 0 && target < held,
          "a row is not in the store");
      copies.emplace_back(source, target);
    }
  floats(store);  // checks it
  float* rows = own_floats(store);
  const int64_t others = store.numel() / (held * size);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, size * copies.size()));
  Threads::share(others, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (const auto& [source, target] : copies)
        std::copy_n(rows + (i * held + source) * size, size, rows + (i * held + target) * size);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def(
      "rope_store(Tensor qkv, Tensor cos, Tensor sin, int heads, Tensor? q_norm, Tensor? k_norm, float eps, "
      "bool interleaved, Tensor(a!)? k_rows, Tensor(b!)? v_rows, Tensor? rows, bool returns_kv) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("rotation_table(Tensor positions, Tensor inv_freq, float magnitude) -> (Tensor, Tensor)");
  m.def(
      "commit_rows(Tensor(a!) store, Tensor page_table, int page_size, Tensor nodes, Tensor first, "
      "Tensor counts, int scratch, int stride) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("swiglu", TORCH_BOX(&swiglu));
  m.impl("rope_store", TORCH_BOX(&rope_store));
  m.impl("rotation_table", TORCH_BOX(&rotation_table));
  m.impl("commit_rows", TORCH_BOX(&commit_rows));
}
