// The tensors that a kernel walks together: one row a parameter, one column a role.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "contract.h"

namespace stepclock {

struct Chunk {
  int64_t row;
  int64_t begin;  // first element within the row
  int64_t num_elements;
  int64_t slot;  // where this chunk's sum is written
};

class Table {
 public:
  // num_elements and first_slots: one entry a row. Rows without elements have no chunk.
  Table(std::vector<int64_t> num_elements, std::vector<DType> dtypes,
        const std::vector<int64_t>& first_slots);

  int64_t num_rows() const { return static_cast<int64_t>(num_elements_.size()); }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Of a row's elements in a column; kMaster has none (see Weights in kernels.h).
  DType dtype(Column column, int64_t row) const;
  // The window's sums: of the row's dtype, or fp32 beside 16 bits.
  void set_accumulator_dtypes(std::vector<DType> dtypes) {
    accumulator_dtypes_ = std::move(dtypes);
  }
  // Moments and buffer.
  void set_state_dtypes(std::vector<DType> dtypes) { state_dtypes_ = std::move(dtypes); }
  int64_t num_elements(int64_t row) const { return num_elements_[row]; }

  // Points a column at new addresses, one a row. True if any differs from before.
  bool set_column(Column column, std::vector<uintptr_t> addresses);
  bool has_column(Column column) const { return !columns_[column].empty() || num_rows() == 0; }

  // The first element of a chunk, or null where the column is not set.
  void* at(Column column, const Chunk& chunk) const {
    if (columns_[column].empty()) return nullptr;
    return reinterpret_cast<void*>(columns_[column][chunk.row] +
                                   chunk.begin * element_bytes(column, chunk.row));
  }
  // A row's scalar (the step counter), whatever the row's own dtype.
  float* scalar(Column column, int64_t row) const {
    return reinterpret_cast<float*>(columns_[column][row]);
  }

  // How many threads are worth waking for this table.
  int useful_threads(int num_threads) const;

 private:
  int64_t element_bytes(Column column, int64_t row) const;

  std::vector<int64_t> num_elements_;
  std::vector<DType> dtypes_;
  std::vector<DType> accumulator_dtypes_;
  std::vector<DType> state_dtypes_;
  std::vector<Chunk> chunks_;
  std::vector<uintptr_t> columns_[kNumColumns];
  int64_t total_elements_ = 0;
};

}  // namespace stepclock
