// Operations between linear layers: RMSNorm, SwiGLU, rotary positions with the store of keys and values; and
// the commit of a window's rows.

#include <cmath>
#include <tuple>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Elements from which on another thread is worth its start.
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
  const int64_t size = norm_size(x, weight);
  const int64_t rows = x.numel() / size;
  const float* from = floats(x);
  const float* factors = floats(weight);
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
  const int64_t size = norm_size(x, weight);
  const int64_t rows = x.numel() / size;
  STD_TORCH_CHECK(residual.numel() == x.numel(), "x and residual differ in size");
  const float* a = floats(x);
  const float* b = floats(residual);
  const float* factors = floats(weight);
  Tensor out = torch::stable::empty_like(x);
  Tensor sum = torch::stable::empty_like(x);
  float* to = own_floats(out);
  float* total = own_floats(sum);
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
  const int64_t rows = gate_up.size(0);
  const int64_t size = gate_up.size(1) / 2;
  const int64_t whole = size / LANES * LANES;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, size));
  const float* from = floats(gate_up);
  Tensor out = torch::stable::new_empty(gate_up, {rows, size});
  float* to = own_floats(out);
  Threads::share(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* gate = from + 2 * t * size;
      const float* up = gate + size;
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

// y[E] = x cos + (x with its pairs swapped) sin, the other elements copied; x and y do not overlap.
static void rotate(
    const float* x, const float* cos, const float* sin, int64_t rotated, int64_t size, bool interleaved,
    float* y) {
  const int64_t half = rotated / 2;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      y[2 * i] = std::fma(b, sin[i], a * cos[i]);
      y[2 * i + 1] = std::fma(a, sin[half + i], b * cos[half + i]);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) y[i] = std::fma(x[half + i], sin[i], x[i] * cos[i]);
    for (int64_t i = half; i < rotated; ++i) y[i] = std::fma(x[i - half], sin[i], x[i] * cos[i]);
  }
  std::copy(x + rotated, x + size, y + rotated);
}

// positions [T], inv_freq [E / 2] -> cosines (c, c) and signed sines (-s, s), [T, 1, E]. A cosine and a sine
// take as long as some 32 other elements.
static std::tuple<Tensor, Tensor> rotation_table(
    const Tensor& positions, const Tensor& inv_freq, double magnitude) {
  const int64_t count = positions.numel();
  const int64_t half = inv_freq.numel();
  const int64_t* position = numbers(positions);
  const float* frequencies = floats(inv_freq);
  Tensor cos = torch::stable::new_empty(inv_freq, {count, 1, 2 * half});
  Tensor sin = torch::stable::new_empty(inv_freq, {count, 1, 2 * half});
  float* cosines = own_floats(cos);
  float* sines = own_floats(sin);
  Threads::share(
      count, std::max<int64_t>(1, GRAIN / 32 / std::max<int64_t>(1, half)), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          for (int64_t i = 0; i < half; ++i) {
            const float angle = (float)position[t] * frequencies[i];
            const float c = std::cos(angle) * (float)magnitude;
            const float s = std::sin(angle) * (float)magnitude;
            float* cosine = cosines + 2 * t * half + i;
            float* sine = sines + 2 * t * half + i;
            cosine[0] = c;
            cosine[half] = c;
            sine[0] = -s;
            sine[half] = s;
          }
      });
  return {cos, sin};
}

// A store [Hkv, R, D] of keys or values, or none, checked for writes of `count` tokens to the rows `index`.
struct Store {
  float* rows = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 0;

  Store(
      const std::optional<Tensor>& store, const std::optional<Tensor>& index, int64_t count,
      int64_t num_kv_heads, int64_t size) {
    STD_TORCH_CHECK(store.has_value() == index.has_value(), "stores and rows are given together");
    if (!store) return;
    STD_TORCH_CHECK(
        store->scalar_type() == torch::headeronly::ScalarType::Float && store->dim() == 3 &&
            store->stride(2) == 1 && store->size(0) == num_kv_heads && store->size(2) == size &&
            index->numel() == count,
        "keys do not fit their store");
    const int64_t* row = numbers(*index);
    const int64_t num_rows = store->size(1);
    for (int64_t t = 0; t < count; ++t)
      STD_TORCH_CHECK(row[t] >= 0 && row[t] < num_rows, "a row is not in the store");
    rows = own_floats(*store);
    head_stride = store->stride(0);
    row_stride = store->stride(1);
  }
};

// qkv [T, Hq + 2 Hkv, D], cos and sin [T, 1, E] -> q [T, Hq, D], k and v [T, Hkv, D], or [0, Hkv, D] unless
// returned; k and v are also written to rows [T] of the stores [Hkv, R, D].
static std::tuple<Tensor, Tensor, Tensor> rope_store(
    const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t heads,
    const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm, double eps, bool interleaved,
    const std::optional<Tensor>& k_rows, const std::optional<Tensor>& v_rows,
    const std::optional<Tensor>& rows, bool returns_kv) {
  // Check the tensors.
  const int64_t count = qkv.size(0);
  const int64_t all_heads = qkv.size(1);
  const int64_t size = qkv.size(2);
  const int64_t rotated = cos.size(2);
  const int64_t num_kv_heads = (all_heads - heads) / 2;
  const int64_t returned = returns_kv ? count : 0;
  STD_TORCH_CHECK(
      cos.numel() == count * rotated && sin.numel() == cos.numel() && rotated <= size && rotated % 2 == 0 &&
          (!q_norm || (q_norm->numel() == size && k_norm->numel() == size)),
      "heads, positions and norms do not fit");
  const float* from = floats(qkv);
  const float* cosines = floats(cos);
  const float* sines = floats(sin);
  const float* q_weight = floats(q_norm);
  const float* k_weight = floats(k_norm);
  const Store key_store(k_rows, rows, count, num_kv_heads, size);
  const Store value_store(v_rows, rows, count, num_kv_heads, size);
  const int64_t* row = rows ? numbers(*rows) : nullptr;
  Tensor q = torch::stable::new_empty(qkv, {count, heads, size});
  Tensor k = torch::stable::new_empty(qkv, {returned, num_kv_heads, size});
  Tensor v = torch::stable::new_empty(qkv, {returned, num_kv_heads, size});
  float* queries = own_floats(q);
  float* keys = own_floats(k);
  float* values = own_floats(v);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, all_heads * size));
  Threads::share(count, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> normed(size);
    std::vector<float> turned(size);
    for (int64_t t = begin; t < end; ++t)
      for (int64_t head = 0; head < all_heads; ++head) {
        // Norm and rotate queries and keys.
        const float* x = from + (t * all_heads + head) * size;
        const bool is_query = head < heads;
        const bool is_value = head >= heads + num_kv_heads;
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

        // Return and store keys and values.
        const int64_t kv_head = (head - heads) % num_kv_heads;
        if (returns_kv)
          std::copy_n(x, size, (is_value ? values : keys) + (t * num_kv_heads + kv_head) * size);
        const Store& store = is_value ? value_store : key_store;
        if (store.rows)
          std::copy_n(x, size, store.rows + kv_head * store.head_stride + row[t] * store.row_stride);
      }
  });
  return {q, k, v};
}

// Copy rows of windows in a store [..., R, D] to the positions behind `first` [B], the first `counts` [B] of
// the nodes [B, n] of each: node j of request b is row scratch + b * stride + j.
static void commit_rows(
    const Tensor& store, const Tensor& page_table, int64_t page_size, const Tensor& nodes,
    const Tensor& first, const Tensor& counts, int64_t scratch, int64_t stride) {
  // Check the tensors.
  const int64_t batch = nodes.size(0);
  const int64_t max_nodes = nodes.size(1);
  const int64_t pages = page_table.size(1);
  const int64_t size = store.size(store.dim() - 1);
  const int64_t num_rows = store.size(store.dim() - 2);
  STD_TORCH_CHECK(
      page_table.size(0) == batch && first.numel() == batch && counts.numel() == batch && size > 0 &&
          num_rows > 0 && page_size > 0,
      "windows and their requests do not fit");
  const int64_t* tables = numbers(page_table);
  const int64_t* node = numbers(nodes);
  const int64_t* first_position = numbers(first);
  const int64_t* count = numbers(counts);

  // Pairs of a row of the scratch and the row of a page.
  std::vector<std::pair<int64_t, int64_t>> copies;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < std::min(count[b], max_nodes); ++i) {
      const int64_t position = first_position[b] + i;
      const int64_t page = position / page_size;
      STD_TORCH_CHECK(position >= 0 && page < pages, "a position has no page");
      const int64_t source = scratch + b * stride + node[b * max_nodes + i];
      const int64_t target = tables[b * pages + page] * page_size + position % page_size;
      STD_TORCH_CHECK(
          node[b * max_nodes + i] >= 0 && source >= 0 && source < num_rows && target >= 0 &&
              target < num_rows,
          "a row is not in the store");
      copies.emplace_back(source, target);
    }

  // Copy them in all layers and heads.
  floats(store);  // checks it
  float* rows = own_floats(store);
  const int64_t planes = store.numel() / (num_rows * size);
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, size * copies.size()));
  Threads::share(planes, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      for (const auto& [source, target] : copies)
        std::copy_n(rows + (i * num_rows + source) * size, size, rows + (i * num_rows + target) * size);
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
