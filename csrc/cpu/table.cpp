// Cuts rows into chunks and keeps the addresses of their columns.
#include "table.h"

#include <algorithm>
#include <utility>

namespace stepclock {
namespace {

// Below this a second thread costs more than it brings: waking one takes some 5 microseconds.
constexpr int64_t kElementsPerThread = 16384;

int64_t bytes_of(DType dtype) {
  if (dtype == DType::kFloat64) return 8;
  return is_half(dtype) ? 2 : 4;
}

}  // namespace

Table::Table(std::vector<int64_t> num_elements, std::vector<DType> dtypes,
             const std::vector<int64_t>& first_slots)
    : num_elements_(std::move(num_elements)),
      dtypes_(std::move(dtypes)),
      accumulator_dtypes_(dtypes_),
      state_dtypes_(dtypes_) {
  for (int64_t row = 0; row < num_rows(); ++row) {
    int64_t slot = first_slots[row];
    for (int64_t begin = 0; begin < num_elements_[row]; begin += kChunkElements) {
      const int64_t size = std::min(kChunkElements, num_elements_[row] - begin);
      chunks_.push_back(Chunk{row, begin, size, slot++});
    }
    total_elements_ += num_elements_[row];
  }
}

bool Table::set_column(Column column, std::vector<uintptr_t> addresses) {
  const bool changed = addresses != columns_[column];
  columns_[column] = std::move(addresses);
  return changed;
}

int Table::useful_threads(int num_threads) const {
  return static_cast<int>(
      std::clamp<int64_t>(total_elements_ / kElementsPerThread, 1, std::max(num_threads, 1)));
}

DType Table::dtype(Column column, int64_t row) const {
  switch (column) {
    case kAccumulator:
      return accumulator_dtypes_[row];
    case kExpAvg:
    case kExpAvgSq:
    case kMaxExpAvgSq:
    case kBuffer:
      return state_dtypes_[row];
    case kAverage:
      return is_half(dtypes_[row]) ? DType::kFloat32 : dtypes_[row];
    default:
      return dtypes_[row];
  }
}

int64_t Table::element_bytes(Column column, int64_t row) const {
  if (column == kMaster) return dtypes_[row] == DType::kBFloat16 ? 2 : 4;
  return bytes_of(dtype(column, row));
}

}  // namespace stepclock
