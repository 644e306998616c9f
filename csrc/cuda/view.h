// The tensors that a kernel walks together, as they lie in device memory.
#pragma once

#include <cstdint>

#include "contract.h"

namespace stepclock {
namespace cuda {

// Pointers into three int64 tensors that the caller keeps: see backends/device_table.py.
struct TableView {
  const int64_t* chunks;        // row, first element and slot of each chunk
  const int64_t* num_elements;  // of each row
  const int64_t* addresses;     // column after column, one a row; 0 where a column is not bound
  int64_t num_rows;
};

// A run of chunks whose rows have the same dtypes: they share a launch.
struct Section {
  int64_t first_chunk, num_chunks;
  DType param, accumulator, state;
};

}  // namespace cuda
}  // namespace stepclock
