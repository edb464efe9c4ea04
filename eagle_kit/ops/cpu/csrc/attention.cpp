// Attention of windows and of prompts to keys in pages. A query's scores, its softmax and its sum of values
// are taken in the order of the keys, and keys that it does not see add zeros: among finite numbers its bits
// depend on its own keys alone.

#include <cmath>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Most query rows that share a reading of the keys, and most scores that are kept of them.
constexpr int64_t MOST_ROWS = 48, MOST_SCORES = 1 << 19;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Which keys a query sees: columns first .. stop - 1, and of those from `window` on the set bits; whether it
// is of a position without a key, which attends to itself alone.
struct Sight {
  int64_t first, stop, window;
  uint64_t bits;
  bool is_unused = false;
  // Set the scores of columns start .. end - 1 that are not seen to minus infinity.
  void hide(float* scores, int64_t start, int64_t end) const {
    std::fill(scores, scores + std::max<int64_t>(0, std::min(first, end) - start), NOTHING);
    for (int64_t c = std::max(start, stop); c < std::min(window, end); ++c) scores[c - start] = NOTHING;
    for (int64_t c = std::max(start, window); c < end; ++c)
      if (c - window > 63 || !(bits >> (c - window) & 1)) scores[c - start] = NOTHING;
  }
};

// Where the key of a column is: in pages before `prefix`, in a scratch behind it.
struct Place {
  const int64_t* table;
  int64_t page_size, prefix, scratch;
  int64_t row(int64_t column) const {
    if (column >= prefix) return scratch + column - prefix;
    return table[column / page_size] * page_size + column % page_size;
  }
  // End of the columns from `column` on that lie behind each other, at most `stop`.
  int64_t run(int64_t column, int64_t stop) const {
    if (column >= prefix) return stop;
    return std::min(std::min(prefix, stop), (column / page_size + 1) * page_size);
  }
};

// Keys and values of one head of a layer.
struct Layer {
  const float *keys, *values;
  int64_t key_row, value_row, key_size, value_size;
  float soft_cap;
};

typedef float Eight __attribute__((vector_size(32)));
typedef float LooseEight __attribute__((vector_size(32), aligned(4)));

// to[d, 0 .. 7] = rows[0 .. 7][d] for eight d.
static inline void transpose_eight(const float* const* rows, float* to, int64_t ld) {
#if defined(__clang__) || __GNUC__ >= 12
  Eight a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    const Eight x = *(const LooseEight*)rows[i], y = *(const LooseEight*)rows[i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = __builtin_shufflevector(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = __builtin_shufflevector(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    *(LooseEight*)(to + i * ld) = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *(LooseEight*)(to + (i + 4) * ld) = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
#else
  for (int d = 0; d < 8; ++d)
    for (int i = 0; i < 8; ++i) to[d * ld + i] = rows[i][d];
#endif
}

// Where the keys of columns c .. c + PANEL - 1 are; behind `stop` the last one again.
static void find_keys(const Layer& layer, const Place& place, int64_t c, int64_t stop, const float** keys) {
  for (int64_t i = 0; i < PANEL;) {
    const int64_t column = std::min(c + i, stop - 1), end = place.run(column, stop);
    const float* key = layer.keys + place.row(column) * layer.key_row;
    for (int64_t j = column; j < end && i < PANEL; ++j, key += layer.key_row) keys[i++] = key;
  }
}

// panel[D, PANEL] = PANEL keys, each a column; the `next` ones are fetched meanwhile.
static void take_keys(int64_t size, const float* const* keys, const float* const* next, float* panel) {
  const int64_t whole = size / 8 * 8;
  for (int64_t i = 0; i < PANEL; i += 8)
    for (int64_t d = 0; d < whole; d += 8) {
      if (d % (LINE / sizeof(float)) == 0)
        for (int j = 0; j < 8; ++j) __builtin_prefetch(next[i + j] + d);
      const float* rows[8];
      for (int j = 0; j < 8; ++j) rows[j] = keys[i + j] + d;
      transpose_eight(rows, panel + d * PANEL + i, PANEL);
    }
  for (int64_t d = whole; d < size; ++d)
    for (int64_t i = 0; i < PANEL; ++i) panel[d * PANEL + i] = keys[i][d];
}

// Attention of `rows` queries q [rows, D], scaled, of one head of keys -> out [rows, E].
static void attend(
    int64_t rows, const float* q, const Sight* sights, const float* sinks, const Place& place, int64_t stop,
    const Layer& layer, std::vector<float>& scores, std::vector<float>& panel, float* out) {
  int64_t start = stop;
  for (int64_t m = 0; m < rows; ++m) start = std::min(start, std::min(sights[m].first, sights[m].window));
  const int64_t size = layer.key_size, wide = layer.value_size;
  const int64_t columns = (stop - start + PANEL - 1) / PANEL * PANEL;
  scores.assign(rows * columns, 0.0f);
  panel.resize(size * PANEL);
  const float *keys[PANEL], *next[PANEL];
  find_keys(layer, place, start, stop, next);
  for (int64_t c = start; c < stop; c += PANEL) {
    std::copy_n(next, PANEL, keys);
    find_keys(layer, place, c + PANEL, stop, next);
    take_keys(size, keys, next, panel.data());
    multiply_panel(rows, q, size, panel.data(), PANEL, size, scores.data() + c - start, columns);
  }
  float totals[MOST_ROWS];
  for (int64_t m = 0; m < rows; ++m) {
    float* mine = scores.data() + m * columns;
    if (layer.soft_cap > 0.0f)
      for (int64_t c = 0; c < stop - start; ++c)
        mine[c] = layer.soft_cap * std::tanh(mine[c] / layer.soft_cap);
    sights[m].hide(mine, start, start + columns);
    Vector most = Vector{} + (sinks ? sinks[m] : NOTHING);
    for (int64_t c = 0; c < columns; c += LANES) {
      const Vector next = *(Loose*)(mine + c);
      most = (next > most) ? next : most;
    }
    float best = most[0];
    for (int lane = 1; lane < LANES; ++lane) best = std::max(best, most[lane]);
    for (int64_t c = 0; c < columns; c += LANES)
      *(Loose*)(mine + c) = exponential(*(Loose*)(mine + c) - best);
    totals[m] = sinks ? std::exp(sinks[m] - best) : 0.0f;
  }
  for (int64_t first = 0; first < rows; first += ROWS) {  // several sums at once, each in the order of keys
    const int64_t many = std::min<int64_t>(ROWS, rows - first);
    for (int64_t c = 0; c < stop - start; ++c)
      for (int64_t m = first; m < first + many; ++m) totals[m] += scores[m * columns + c];
  }
  std::fill_n(out, rows * wide, 0.0f);
  const int64_t whole = wide / PANEL * PANEL;
  for (int64_t c = start; c < stop;) {
    const int64_t end = place.run(c, stop);
    const float *weights = scores.data() + c - start, *values = layer.values + place.row(c) * layer.value_row;
    const float* next = end < stop ? layer.values + place.row(end) * layer.value_row : values;
    for (int64_t e = 0; e < whole; e += PANEL)
      multiply_panel(
          rows, weights, columns, values + e, layer.value_row, end - c, out + e, wide, next + e,
          layer.value_row);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t e = whole; e < wide; ++e)
        for (int64_t i = 0; i < end - c; ++i)
          out[m * wide + e] =
              std::fma(weights[m * columns + i], values[i * layer.value_row + e], out[m * wide + e]);
    c = end;
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t e = 0; e < wide; ++e) out[m * wide + e] /= totals[m];
}

// First position that a query at `position` sees (variant.Limits).
static int64_t first_seen(int64_t position, int64_t window, int64_t chunk) {
  int64_t first = window ? std::max<int64_t>(position + 1 - window, 0) : 0;
  return chunk ? std::max(first, position / chunk * chunk) : first;
}

// Sight of node `own` of a window of keys (variant.seen_within).
static Sight sight_of(
    uint64_t ancestors, int64_t own, int64_t prefix, int64_t first_position, int64_t window, int64_t chunk) {
  const uint64_t before = own >= 63 ? ancestors : ancestors & ((uint64_t{2} << own) - 1);
  const int64_t position = prefix + __builtin_popcountll(before) - 1,
                first = first_seen(position, window, chunk);
  uint64_t bits = ancestors;
  if (window || chunk)
    for (int64_t j = 0; j < 64; ++j) {
      const int64_t behind = j < 63 ? __builtin_popcountll(before >> (j + 1)) : 0;
      if (position - behind < first) bits &= ~(uint64_t{1} << j);
    }
  return {std::min(std::max(first, first_position), prefix), prefix, prefix, bits};
}

// The queries of one head of keys, packed and scaled, with what they see; a thread's own.
struct Task {
  std::vector<float> q, out, scores, panel, sinks;
  std::vector<Sight> sights;
};

// Tensors of an operation, checked.
struct Call {
  const float *q, *keys, *values, *sinks;
  float* out;
  int64_t heads, key_heads, group, key_head, value_head;
  float scale;
  Layer layer;

  Call(
      const Tensor& queries, const Tensor& k_rows, const Tensor& v_rows, const std::optional<Tensor>& sinks_,
      const Tensor& result, double scale_, double soft_cap)
      : q(floats(queries)),
        keys(rows_of(k_rows)),
        values(rows_of(v_rows)),
        sinks(floats(sinks_)),
        out(own_floats(result)),
        heads(queries.size(queries.dim() - 2)),
        key_heads(k_rows.size(0)),
        group(heads / std::max<int64_t>(1, key_heads)),
        key_head(k_rows.stride(0)),
        value_head(v_rows.stride(0)),
        scale((float)scale_),
        layer{nullptr,        nullptr,        k_rows.stride(1), v_rows.stride(1),
              k_rows.size(2), v_rows.size(2), (float)soft_cap} {
    STD_TORCH_CHECK(
        queries.size(queries.dim() - 1) == k_rows.size(2) && key_heads == v_rows.size(0) &&
            group * key_heads == heads && (!sinks_ || sinks_->numel() == heads),
        "queries, keys, values and sinks do not fit");
  }

  static const float* rows_of(const Tensor& store) {
    STD_TORCH_CHECK(
        store.scalar_type() == torch::headeronly::ScalarType::Float && store.dim() == 3 &&
            store.stride(2) == 1,
        "keys and values are not fp32 rows");
    return (const float*)store.const_data_ptr();
  }

  Layer of_head(int64_t head) const {
    Layer mine = layer;
    mine.keys = keys + head * key_head, mine.values = values + head * value_head;
    return mine;
  }

  // Rows first .. last - 1 of the group of heads that share the key head `head`, of the queries from t0 on,
  // which see `sights` of the columns before `stop`.
  void run(
      Task& task, int64_t t0, int64_t head, int64_t first, int64_t last, const Place& place,
      int64_t stop) const {
    const int64_t size = layer.key_size, wide = layer.value_size;
    const int64_t most =
        std::min(MOST_ROWS, std::max<int64_t>(ROWS, MOST_SCORES / std::max<int64_t>(1, stop)));
    const auto at = [&](int64_t m) { return (t0 + m / group) * heads + head * group + m % group; };
    for (int64_t begin = first; begin < last; begin += most) {
      const int64_t rows = std::min(most, last - begin);
      task.q.resize(rows * size), task.out.resize(rows * wide), task.sinks.resize(rows);
      const Sight* sights = task.sights.data() + begin - first;
      for (int64_t m = 0; m < rows; ++m) {
        const float* from = q + at(begin + m) * size;
        for (int64_t d = 0; d < size; ++d) task.q[m * size + d] = from[d] * scale;
        if (sinks) task.sinks[m] = sights[m].is_unused ? NOTHING : sinks[head * group + (begin + m) % group];
      }
      attend(
          rows, task.q.data(), sights, sinks ? task.sinks.data() : nullptr, place, stop, of_head(head),
          task.scores, task.panel, task.out.data());
      for (int64_t m = 0; m < rows; ++m)
        std::copy_n(task.out.data() + m * wide, wide, out + at(begin + m) * wide);
    }
  }
};

// q [B * N, Hq, D], k_rows [Hkv, R, D], v_rows [Hkv, R, E], page_table [B, P], prefix_lens [B], ancestors [B,
// N] -> [B * N, Hq, E]; sizes: page_size, first_position, scratch_start, scratch_stride, num_keys, window,
// chunk (WindowPlan and Limits).
static Tensor window_attention(
    const Tensor& q, const Tensor& k_rows, const Tensor& v_rows, const Tensor& page_table,
    const Tensor& prefix_lens, const Tensor& ancestors, const std::vector<int64_t>& sizes, double scale,
    double soft_cap, const std::optional<Tensor>& sinks) {
  const int64_t page_size = sizes[0], first_position = sizes[1], scratch = sizes[2], stride = sizes[3],
                keys = sizes[4];
  STD_TORCH_CHECK(q.dim() == 3 && ancestors.dim() == 2, "queries are not [T, Hq, D]");
  const int64_t batch = ancestors.size(0), nodes = ancestors.size(1), pages = page_table.size(1);
  STD_TORCH_CHECK(
      prefix_lens.numel() == batch && page_table.size(0) == batch && nodes <= keys && keys <= 64 &&
          q.size(0) == batch * nodes,
      "a window does not fit its plan");
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), v_rows.size(2)});
  const Call call(q, k_rows, v_rows, sinks, out, scale, soft_cap);
  const int64_t *tables = numbers(page_table), *lens = numbers(prefix_lens), *bits = numbers(ancestors);
  const int64_t rows = nodes * call.group, threads = torch::stable::get_num_threads();
  if (batch == 0 || rows == 0) return out;
  const int64_t fair = rows * batch * call.key_heads / (2 * threads);
  const int64_t part = std::min({rows, MOST_ROWS, std::max<int64_t>(ROWS, fair)}),
                parts = (rows + part - 1) / part;
  Threads::share(batch * call.key_heads * parts, 1, [&](int64_t begin, int64_t end) {
    static thread_local Task task;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t b = t / (call.key_heads * parts), head = t / parts % call.key_heads, prefix = lens[b];
      const int64_t first = t % parts * part, last = std::min(rows, first + part);
      task.sights.clear();
      for (int64_t m = first; m < last; ++m) {
        const int64_t node = m / call.group;
        const uint64_t seen = bits[b * nodes + node];
        task.sights.push_back(
            sight_of(seen, keys - nodes + node, prefix, first_position, sizes[5], sizes[6]));
      }
      const Place place{tables + b * pages, page_size, prefix, scratch + b * stride};
      call.run(task, b * nodes, head, first, last, place, prefix + keys);
    }
  });
  return out;
}

// q [T, Hq, D], the rows of all requests, page_tables [B, P], cu_rows [B + 1], starts [B] -> [T, Hq, E];
// sizes: page_size, first_position, window, chunk (PrefillPlan and Limits).
static Tensor prompt_attention(
    const Tensor& q, const Tensor& k_rows, const Tensor& v_rows, const Tensor& page_tables,
    const Tensor& cu_rows, const Tensor& starts, const std::vector<int64_t>& sizes, double scale,
    double soft_cap, const std::optional<Tensor>& sinks) {
  const int64_t page_size = sizes[0], first_position = sizes[1], batch = starts.size(0),
                pages = page_tables.size(1);
  STD_TORCH_CHECK(q.dim() == 3, "queries are not [T, Hq, D]");
  const int64_t *tables = numbers(page_tables), *borders = numbers(cu_rows), *from = numbers(starts);
  STD_TORCH_CHECK(
      cu_rows.numel() == batch + 1 && page_tables.size(0) == batch && borders[batch] <= q.size(0),
      "prompts do not fit their plan");
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), v_rows.size(2)});
  const Call call(q, k_rows, v_rows, sinks, out, scale, soft_cap);
  const int64_t block = std::max<int64_t>(1, MOST_ROWS / std::max<int64_t>(1, call.group));
  struct Part {
    int64_t request, begin, end;
  };
  std::vector<Part> parts;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = borders[b]; t < borders[b + 1]; t += block)
      parts.push_back({b, t, std::min(t + block, borders[b + 1])});
  Threads::share(parts.size() * call.key_heads, 1, [&](int64_t begin, int64_t end) {
    static thread_local Task task;
    for (int64_t t = begin; t < end; ++t) {
      const auto& [b, first, last] = parts[t / call.key_heads];
      const int64_t position = from[b] + first - borders[b], stop = position + last - first;
      task.sights.clear();
      for (int64_t m = 0; m < (last - first) * call.group; ++m) {
        const int64_t mine = position + m / call.group;
        const int64_t seen = std::max(first_seen(mine, sizes[2], sizes[3]), first_position);
        task.sights.push_back({std::min(seen, mine), mine + 1, stop, 0, mine < first_position});
      }
      const Place place{tables + b * pages, page_size, stop, 0};
      call.run(task, first, t % call.key_heads, 0, (last - first) * call.group, place, stop);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def(
      "window_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor page_table, Tensor prefix_lens, "
      "Tensor ancestors, int[] sizes, float scale, float soft_cap, Tensor? sinks) -> Tensor");
  m.def(
      "prompt_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor page_tables, Tensor cu_rows, Tensor "
      "starts, "
      "int[] sizes, float scale, float soft_cap, Tensor? sinks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&window_attention));
  m.impl("prompt_attention", TORCH_BOX(&prompt_attention));
}
