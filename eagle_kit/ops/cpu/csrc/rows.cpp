// Rows of tables of any type, copied in one call: a decode cycle reads the slots' rows and writes them back.

#include <cstring>
#include <vector>

#include "vectors.h"

// A contiguous table [M, ...] as bytes.
struct Table {
  char* data;
  int64_t rows;
  int64_t bytes;
};

static Table table_of(const Tensor& x) {
  STD_TORCH_CHECK(
      x.is_contiguous() && x.dim() > 0 && x.size(0) > 0, "a table must be contiguous and have rows");
  return {(char*)x.data_ptr(), x.size(0), x.numel() / x.size(0) * (int64_t)x.element_size()};
}

static void check_rows(const int64_t* rows, int64_t count, int64_t most) {
  for (int64_t b = 0; b < count; ++b) STD_TORCH_CHECK(rows[b] >= 0 && rows[b] < most, "there is no such row");
}

// Values [B, ...] of the type and size of a table's rows, as bytes.
static const char* values_of(const Tensor& x, const Tensor& table, int64_t count, int64_t bytes) {
  STD_TORCH_CHECK(
      x.is_contiguous() && x.scalar_type() == table.scalar_type() &&
          x.numel() * (int64_t)x.element_size() == count * bytes,
      "values do not fit the rows of their table");
  return (const char*)x.data_ptr();
}

// Rows [B] of each table [M, ...] -> [B, ...].
static std::vector<Tensor> gather_rows(std::vector<Tensor> tables, const Tensor& rows) {
  const int64_t count = rows.numel();
  const int64_t* row = numbers(rows);
  std::vector<Tensor> gathered;
  for (const Tensor& each : tables) {
    const Table from = table_of(each);
    check_rows(row, count, from.rows);
    std::vector<int64_t> shape{count};
    for (int64_t i = 1; i < each.dim(); ++i) shape.push_back(each.size(i));
    gathered.push_back(torch::stable::new_empty(each, shape));
    char* to = (char*)gathered.back().data_ptr();
    for (int64_t b = 0; b < count; ++b)
      std::memcpy(to + b * from.bytes, from.data + row[b] * from.bytes, from.bytes);
  }
  return gathered;
}

// Overwrite rows [B] of each table by values [B, ...].
static void write_rows(std::vector<Tensor> tables, const Tensor& rows, std::vector<Tensor> values) {
  STD_TORCH_CHECK(tables.size() == values.size(), "there must be values of each table");
  const int64_t count = rows.numel();
  const int64_t* row = numbers(rows);
  for (size_t i = 0; i < tables.size(); ++i) {
    const Table to = table_of(tables[i]);
    check_rows(row, count, to.rows);
    const char* from = values_of(values[i], tables[i], count, to.bytes);
    for (int64_t b = 0; b < count; ++b)
      std::memcpy(to.data + row[b] * to.bytes, from + b * to.bytes, to.bytes);
  }
}

// Append values [B, ...] to rows [B] of each table [M, N, ...], behind their first `counts` [M] entries, or
// over the last one where a row is full, and add `added` [B] to the counts.
static void append_rows(
    std::vector<Tensor> tables, const Tensor& counts, const Tensor& rows, std::vector<Tensor> values,
    const Tensor& added) {
  STD_TORCH_CHECK(tables.size() == values.size(), "there must be values of each table");
  const int64_t count = rows.numel();
  const int64_t* row = numbers(rows);
  const int64_t* num_added = numbers(added);
  STD_TORCH_CHECK(added.numel() == count, "a count must be added for each row");
  check_rows(row, count, counts.numel());
  numbers(counts);  // checks them
  int64_t* row_counts = (int64_t*)counts.data_ptr();
  for (size_t i = 0; i < tables.size(); ++i) {
    const Table to = table_of(tables[i]);
    STD_TORCH_CHECK(
        tables[i].dim() > 1 && tables[i].size(1) > 0 && to.rows == counts.numel(),
        "a table must have entries of all rows");
    const int64_t entries = tables[i].size(1);
    const int64_t bytes = to.bytes / entries;
    const char* from = values_of(values[i], tables[i], count, bytes);
    for (int64_t b = 0; b < count; ++b) {
      const int64_t entry = std::min(std::max<int64_t>(row_counts[row[b]], 0), entries - 1);
      std::memcpy(to.data + row[b] * to.bytes + entry * bytes, from + b * bytes, bytes);
    }
  }
  for (int64_t b = 0; b < count; ++b) row_counts[row[b]] += num_added[b];
}

STABLE_TORCH_LIBRARY_FRAGMENT(eagle_kit_cpp, m) {
  m.def("gather_rows(Tensor[] tables, Tensor rows) -> Tensor[]");
  m.def("write_rows(Tensor(a!)[] tables, Tensor rows, Tensor[] values) -> ()");
  m.def(
      "append_rows(Tensor(a!)[] tables, Tensor(b!) counts, Tensor rows, Tensor[] values, Tensor added) -> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(eagle_kit_cpp, CPU, m) {
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
  m.impl("write_rows", TORCH_BOX(&write_rows));
  m.impl("append_rows", TORCH_BOX(&append_rows));
}
