// Attention of windows and of prompts to keys in pages. A query's scores, its softmax and its sum of values
// are computed in the order of the keys, and keys that it does not see add zeros: among finite numbers its
// bits depend on its own keys alone.
//
// Legend: B requests, N nodes of a window, T queries, Hq / Hkv heads, D key size, E value size, R rows of a
// store, P pages of a request. Columns are a request's keys in their order: the prefix, then the window.

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "threads.h"
#include "vectors.h"

// Largest number of query rows that share a reading of the keys, and of scores that are kept for them.
constexpr int64_t MAX_ROWS = 48;
constexpr int64_t MAX_SCORES = 1 << 19;
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// Bits of the keys of a window: key j is bit j % 64 of word j / 64.
constexpr int64_t MAX_WORDS = 2;
struct KeyBits {
  std::array<uint64_t, MAX_WORDS> words{};

  bool has(int64_t key) const { return key < 64 * MAX_WORDS && words[key / 64] >> (key % 64) & 1; }
  void remove(int64_t key) { words[key / 64] &= ~(uint64_t{1} << (key % 64)); }
};

// Columns that a query sees: `first` .. `stop` - 1, and those from `window` on whose bits are set. A query of
// a position without a key sees itself alone.
struct Visibility {
  int64_t first;
  int64_t stop;
  int64_t window;
  KeyBits bits;
  bool is_unused = false;

  // Set the scores of the columns start .. end - 1 that are not seen to minus infinity.
  void mask(float* scores, int64_t start, int64_t end) const {
    std::fill(scores, scores + std::max<int64_t>(0, std::min(first, end) - start), MINUS_INFINITY);
    for (int64_t c = std::max(start, stop); c < std::min(window, end); ++c)
      scores[c - start] = MINUS_INFINITY;
    for (int64_t c = std::max(start, window); c < end; ++c)
      if (!bits.has(c - window)) scores[c - start] = MINUS_INFINITY;
  }
};

// Rows of the store that hold the columns of a request: in pages before `prefix`, in a scratch behind it.
struct ColumnRows {
  const int64_t* table;
  int64_t page_size;
  int64_t prefix;
  int64_t scratch;

  int64_t row(int64_t column) const {
    if (column >= prefix) return scratch + column - prefix;
    return table[column / page_size] * page_size + column % page_size;
  }

  // End of the columns from `column` on whose rows are consecutive, at most `stop`.
  int64_t run_end(int64_t column, int64_t stop) const {
    if (column >= prefix) return stop;
    return std::min(std::min(prefix, stop), (column / page_size + 1) * page_size);
  }
};

// Keys and values of one head of a layer; strides in numbers.
struct HeadStore {
  const float* keys;
  const float* values;
  int64_t key_stride;
  int64_t value_stride;
  int64_t key_size;
  int64_t value_size;
  float soft_cap;
};

typedef float Eight __attribute__((vector_size(32)));
typedef float LooseEight __attribute__((vector_size(32), aligned(4)));

// to[d, 0 .. 7] = rows[0 .. 7][d] for eight d.
static inline void transpose_eight(const float* const* rows, float* to, int64_t ld) {
#if defined(__clang__) || __GNUC__ >= 12
  Eight a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    const Eight x = *(const LooseEight*)rows[i];
    const Eight y = *(const LooseEight*)rows[i + 1];
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

// Addresses of the keys of columns c .. c + PANEL - 1; behind `stop` that of the last one again.
static void find_keys(
    const HeadStore& store, const ColumnRows& columns, int64_t c, int64_t stop, const float** keys) {
  for (int64_t i = 0; i < PANEL;) {
    const int64_t column = std::min(c + i, stop - 1);
    const int64_t end = columns.run_end(column, stop);
    const float* key = store.keys + columns.row(column) * store.key_stride;
    for (int64_t j = column; j < end && i < PANEL; ++j, key += store.key_stride) keys[i++] = key;
  }
}

// panel[D, PANEL] = PANEL keys, each a column; the `next` ones are prefetched meanwhile.
static void pack_keys(int64_t size, const float* const* keys, const float* const* next, float* panel) {
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

// Attention of `rows` queries q [rows, D], scaled, to the columns before `stop` of one head -> out [rows, E].
static void attend(
    int64_t rows, const float* q, const Visibility* visible, const float* sinks, const ColumnRows& columns,
    int64_t stop, const HeadStore& store, std::vector<float>& scores, std::vector<float>& panel, float* out) {
  // Columns that any of the queries sees, in panels.
  int64_t start = stop;
  for (int64_t m = 0; m < rows; ++m) start = std::min(start, std::min(visible[m].first, visible[m].window));
  const int64_t key_size = store.key_size;
  const int64_t value_size = store.value_size;
  const int64_t width = (stop - start + PANEL - 1) / PANEL * PANEL;
  scores.assign(rows * width, 0.0f);
  panel.resize(key_size * PANEL);

  // Scores, a panel of keys at a time.
  const float* keys[PANEL];
  const float* next[PANEL];
  find_keys(store, columns, start, stop, next);
  for (int64_t c = start; c < stop; c += PANEL) {
    std::copy_n(next, PANEL, keys);
    find_keys(store, columns, c + PANEL, stop, next);
    pack_keys(key_size, keys, next, panel.data());
    multiply_panel(rows, q, key_size, panel.data(), PANEL, key_size, scores.data() + c - start, width);
  }

  // Weights: exponentials relative to the best score of a query.
  float totals[MAX_ROWS];
  for (int64_t m = 0; m < rows; ++m) {
    float* row = scores.data() + m * width;
    if (store.soft_cap > 0.0f)
      for (int64_t c = 0; c < stop - start; ++c)
        row[c] = store.soft_cap * std::tanh(row[c] / store.soft_cap);
    visible[m].mask(row, start, start + width);
    Vector most = Vector{} + (sinks ? sinks[m] : MINUS_INFINITY);
    for (int64_t c = 0; c < width; c += LANES) {
      const Vector part = *(Loose*)(row + c);
      most = (part > most) ? part : most;
    }
    float best = most[0];
    for (int lane = 1; lane < LANES; ++lane) best = std::max(best, most[lane]);
    for (int64_t c = 0; c < width; c += LANES) *(Loose*)(row + c) = exponential(*(Loose*)(row + c) - best);
    totals[m] = sinks ? std::exp(sinks[m] - best) : 0.0f;
  }

  // Their sums, of several queries at once, each in the order of the keys.
  for (int64_t first = 0; first < rows; first += ROWS) {
    const int64_t count = std::min<int64_t>(ROWS, rows - first);
    for (int64_t c = 0; c < stop - start; ++c)
      for (int64_t m = first; m < first + count; ++m) totals[m] += scores[m * width + c];
  }

  // Weighted values, a run of consecutive rows at a time; the next run is prefetched meanwhile.
  std::fill_n(out, rows * value_size, 0.0f);
  const int64_t whole = value_size / PANEL * PANEL;
  for (int64_t c = start; c < stop;) {
    const int64_t end = columns.run_end(c, stop);
    const float* weights = scores.data() + c - start;
    const float* values = store.values + columns.row(c) * store.value_stride;
    const float* ahead = end < stop ? store.values + columns.row(end) * store.value_stride : values;
    for (int64_t e = 0; e < whole; e += PANEL)
      multiply_panel(
          rows, weights, width, values + e, store.value_stride, end - c, out + e, value_size, ahead + e,
          store.value_stride);
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t e = whole; e < value_size; ++e)
        for (int64_t i = 0; i < end - c; ++i)
          out[m * value_size + e] = std::fma(
              weights[m * width + i], values[i * store.value_stride + e], out[m * value_size + e]);
    c = end;
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t e = 0; e < value_size; ++e) out[m * value_size + e] /= totals[m];
}

// First position that a query at `position` sees (variant.Limits).
static int64_t first_seen(int64_t position, int64_t window, int64_t chunk) {
  const int64_t first = window ? std::max<int64_t>(position + 1 - window, 0) : 0;
  return chunk ? std::max(first, position / chunk * chunk) : first;
}

// Columns that a node sees whose own key is number `own` of its window (variant.seen_within).
static Visibility node_visibility(
    const KeyBits& ancestors, int64_t own, int64_t prefix, int64_t first_position, int64_t window,
    int64_t chunk) {
  if (!window && !chunk) return {std::min(first_position, prefix), prefix, prefix, ancestors};

  // The node's position, and the first that it sees.
  int64_t num_ancestors = 0;
  for (int64_t j = 0; j <= own; ++j) num_ancestors += ancestors.has(j);
  const int64_t first = first_seen(prefix + num_ancestors - 1, window, chunk);

  // Ancestors before it are not seen. Their positions follow each other from the prefix on.
  KeyBits bits = ancestors;
  int64_t position = prefix;
  for (int64_t j = 0; j <= own && position < first; ++j)
    if (ancestors.has(j)) {
      bits.remove(j);
      ++position;
    }
  return {std::min(std::max(first, first_position), prefix), prefix, prefix, bits};
}

// Memory of a thread: queries of one key head, packed and scaled, the columns that they see, and results.
struct Workspace {
  std::vector<float> q, out, scores, panel, sinks;
  std::vector<Visibility> visible;
};

// Checked tensors of an operation.
struct Operands {
  const float* q;
  const float* keys;
  const float* values;
  const float* sinks;
  float* out;
  int64_t heads;
  int64_t key_heads;
  int64_t group;
  int64_t key_head_stride;
  int64_t value_head_stride;
  float scale;
  HeadStore store;

  Operands(
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
        key_head_stride(k_rows.stride(0)),
        value_head_stride(v_rows.stride(0)),
        scale((float)scale_),
        store{nullptr,        nullptr,        k_rows.stride(1), v_rows.stride(1),
              k_rows.size(2), v_rows.size(2), (float)soft_cap} {
    STD_TORCH_CHECK(
        queries.size(queries.dim() - 1) == k_rows.size(2) && key_heads == v_rows.size(0) &&
            group * key_heads == heads && (!sinks_ || sinks_->numel() == heads),
        "queries, keys, values and sinks do not fit");
  }

  static const float* rows_of(const Tensor& rows) {
    STD_TORCH_CHECK(
        rows.scalar_type() == torch::headeronly::ScalarType::Float && rows.dim() == 3 && rows.stride(2) == 1,
        "keys and values are not fp32 rows");
    return (const float*)rows.const_data_ptr();
  }

  HeadStore of_head(int64_t head) const {
    HeadStore of_one = store;
    of_one.keys = keys + head * key_head_stride;
    of_one.values = values + head * value_head_stride;
    return of_one;
  }

  // Attend with rows first .. last - 1 of the queries from number t0 on. A row is a query and a head of the
  // group that shares the key head `head`; workspace.visible has the columns before `stop` that it sees.
  void run(
      Workspace& workspace, int64_t t0, int64_t head, int64_t first, int64_t last, const ColumnRows& columns,
      int64_t stop) const {
    const int64_t key_size = store.key_size;
    const int64_t value_size = store.value_size;
    const int64_t fitting = std::max<int64_t>(ROWS, MAX_SCORES / std::max<int64_t>(1, stop));
    const int64_t block = std::min(MAX_ROWS, fitting);
    const auto row_of = [&](int64_t m) { return (t0 + m / group) * heads + head * group + m % group; };
    for (int64_t begin = first; begin < last; begin += block) {
      // Pack and scale the queries of a block.
      const int64_t rows = std::min(block, last - begin);
      workspace.q.resize(rows * key_size);
      workspace.out.resize(rows * value_size);
      workspace.sinks.resize(rows);
      const Visibility* visible = workspace.visible.data() + begin - first;
      for (int64_t m = 0; m < rows; ++m) {
        const float* query = q + row_of(begin + m) * key_size;
        for (int64_t d = 0; d < key_size; ++d) workspace.q[m * key_size + d] = query[d] * scale;
        if (sinks)
          workspace.sinks[m] =
              visible[m].is_unused ? MINUS_INFINITY : sinks[head * group + (begin + m) % group];
      }

      // Attend, and copy the results to their rows.
      attend(
          rows, workspace.q.data(), visible, sinks ? workspace.sinks.data() : nullptr, columns, stop,
          of_head(head), workspace.scores, workspace.panel, workspace.out.data());
      for (int64_t m = 0; m < rows; ++m)
        std::copy_n(
            workspace.out.data() + m * value_size, value_size, out + row_of(begin + m) * value_size);
    }
  }
};

// q [B * N, Hq, D], k_rows [Hkv, R, D], v_rows [Hkv, R, E], page_table [B, P], prefix_lens [B], ancestors [B,
// N, W] -> [B * N, Hq, E]; sizes: page_size, first_position, scratch_start, scratch_stride, num_keys, window,
// chunk (WindowPlan and Limits).
static Tensor window_attention(
    const Tensor& q, const Tensor& k_rows, const Tensor& v_rows, const Tensor& page_table,
    const Tensor& prefix_lens, const Tensor& ancestors, const std::vector<int64_t>& sizes, double scale,
    double soft_cap, const std::optional<Tensor>& sinks) {
  const int64_t page_size = sizes[0];
  const int64_t first_position = sizes[1];
  const int64_t scratch_start = sizes[2];
  const int64_t scratch_stride = sizes[3];
  const int64_t num_keys = sizes[4];
  const int64_t window = sizes[5];
  const int64_t chunk = sizes[6];

  // Check the tensors.
  STD_TORCH_CHECK(q.dim() == 3 && ancestors.dim() == 3, "queries are not [T, Hq, D]");
  const int64_t batch = ancestors.size(0);
  const int64_t nodes = ancestors.size(1);
  const int64_t words = ancestors.size(2);
  const int64_t pages = page_table.size(1);
  STD_TORCH_CHECK(
      prefix_lens.numel() == batch && page_table.size(0) == batch && nodes <= num_keys &&
          num_keys <= 64 * words && words <= MAX_WORDS && q.size(0) == batch * nodes,
      "a window does not fit its plan");
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), v_rows.size(2)});
  const Operands operands(q, k_rows, v_rows, sinks, out, scale, soft_cap);
  const int64_t* tables = numbers(page_table);
  const int64_t* lens = numbers(prefix_lens);
  const int64_t* bits = numbers(ancestors);  // [B, N, W]

  // A part is some rows of one request and key head. There are at least two for each thread, if rows allow.
  const int64_t key_heads = operands.key_heads;
  const int64_t rows = nodes * operands.group;
  const int64_t threads = torch::stable::get_num_threads();
  if (batch == 0 || rows == 0) return out;
  const int64_t fair = rows * batch * key_heads / (2 * threads);
  const int64_t part = std::min({rows, MAX_ROWS, std::max<int64_t>(ROWS, fair)});
  const int64_t parts = (rows + part - 1) / part;
  Threads::share(batch * key_heads * parts, 1, [&](int64_t begin, int64_t end) {
    static thread_local Workspace workspace;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t b = t / (key_heads * parts);
      const int64_t head = t / parts % key_heads;
      const int64_t prefix = lens[b];
      const int64_t first = t % parts * part;
      const int64_t last = std::min(rows, first + part);
      workspace.visible.clear();
      for (int64_t m = first; m < last; ++m) {
        const int64_t node = m / operands.group;
        KeyBits node_bits;
        std::copy_n(bits + (b * nodes + node) * words, words, node_bits.words.begin());
        workspace.visible.push_back(
            node_visibility(node_bits, num_keys - nodes + node, prefix, first_position, window, chunk));
      }
      const ColumnRows columns{tables + b * pages, page_size, prefix, scratch_start + b * scratch_stride};
      operands.run(workspace, b * nodes, head, first, last, columns, prefix + num_keys);
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
  const int64_t page_size = sizes[0];
  const int64_t first_position = sizes[1];
  const int64_t window = sizes[2];
  const int64_t chunk = sizes[3];

  // Check the tensors.
  const int64_t batch = starts.size(0);
  const int64_t pages = page_tables.size(1);
  STD_TORCH_CHECK(q.dim() == 3, "queries are not [T, Hq, D]");
  const int64_t* tables = numbers(page_tables);
  const int64_t* bounds = numbers(cu_rows);
  const int64_t* first_positions = numbers(starts);
  STD_TORCH_CHECK(
      cu_rows.numel() == batch + 1 && page_tables.size(0) == batch && bounds[batch] <= q.size(0),
      "prompts do not fit their plan");
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), v_rows.size(2)});
  const Operands operands(q, k_rows, v_rows, sinks, out, scale, soft_cap);

  // A part is some successive queries of one request; each key head runs it.
  struct Part {
    int64_t request;
    int64_t begin;
    int64_t end;
  };
  const int64_t block = std::max<int64_t>(1, MAX_ROWS / std::max<int64_t>(1, operands.group));
  std::vector<Part> parts;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = bounds[b]; t < bounds[b + 1]; t += block)
      parts.push_back({b, t, std::min(t + block, bounds[b + 1])});
  Threads::share(parts.size() * operands.key_heads, 1, [&](int64_t begin, int64_t end) {
    static thread_local Workspace workspace;
    for (int64_t t = begin; t < end; ++t) {
      const auto& [b, first, last] = parts[t / operands.key_heads];
      const int64_t position = first_positions[b] + first - bounds[b];
      const int64_t stop = position + last - first;
      const int64_t rows = (last - first) * operands.group;
      workspace.visible.clear();
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t row_position = position + m / operands.group;
        const int64_t seen = std::max(first_seen(row_position, window, chunk), first_position);
        const bool is_unused = row_position < first_position;
        workspace.visible.push_back({std::min(seen, row_position), row_position + 1, stop, {}, is_unused});
      }
      const ColumnRows columns{tables + b * pages, page_size, stop, 0};
      operands.run(workspace, first, t % operands.key_heads, 0, rows, columns, stop);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def(
      "window_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor page_table, Tensor prefix_lens, "
      "Tensor ancestors, int[] sizes, float scale, float soft_cap, Tensor? sinks) -> Tensor");
  m.def(
      "prompt_attention(Tensor q, Tensor k_rows, Tensor v_rows, Tensor page_tables, Tensor cu_rows, "
      "Tensor starts, int[] sizes, float scale, float soft_cap, Tensor? sinks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) {
  m.impl("window_attention", TORCH_BOX(&window_attention));
  m.impl("prompt_attention", TORCH_BOX(&prompt_attention));
}
