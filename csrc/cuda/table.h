// Where a block of a kernel finds its elements.
#pragma once

#include <cstdint>

#include "contract.h"
#include "device.h"
#include "view.h"

namespace stepclock {
namespace cuda {

// A part of a chunk: the elements [begin, begin + num_elements) of a row.
struct Span {
  int64_t row, begin, num_elements, slot;
  int64_t offset;  // of begin within its chunk
};

// The part of a chunk that a block works on; a chunk is cut into num_parts equal ones.
__device__ inline Span find_span(const TableView& table, int64_t first_chunk, int num_parts) {
  const int64_t block = static_cast<int64_t>(blockIdx.x);
  const int64_t* chunk = table.chunks + (first_chunk + block / num_parts) * 3;
  const int64_t row = chunk[0];
  const int64_t left = table.num_elements[row] - chunk[1];
  const int64_t in_chunk = left < kChunkElements ? left : kChunkElements;
  const int64_t part_size = kChunkElements / num_parts;
  const int64_t offset = block % num_parts * part_size;
  const int64_t rest = in_chunk - offset;
  const int64_t size = rest < 0 ? 0 : (rest < part_size ? rest : part_size);
  return Span{row, chunk[1] + offset, size, chunk[2], offset};
}

// The first element of a row in a column; null where the column is not used.
__device__ inline char* find_column(const TableView& table, Column column, int64_t row,
                                    bool is_used = true) {
  const int64_t address = is_used ? table.addresses[column * table.num_rows + row] : 0;
  return as_global(reinterpret_cast<char*>(address));
}

}  // namespace cuda
}  // namespace stepclock
