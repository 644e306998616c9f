// Runs every CUDA kernel in the simulator under the sanitizers, without Python.
//
// Each tensor is an allocation of its exact size, so that one byte too far is seen. Prints how many
// ops ran; what the sanitizers find ends the program.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "launch.h"

using namespace stepclock;

namespace {

constexpr int64_t kSizes[] = {0, 1, 255, 257, 4097, 16385};

int num_ops = 0;

void demand(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s is wrong; %s\n", what, simulator::machine.error.c_str());
  std::exit(1);
}

void check(cudaError_t error, const char* op) {
  demand(error == cudaSuccess, op);
  ++num_ops;
}

int64_t bytes_of(DType dtype) { return is_half(dtype) ? 2 : dtype == DType::kFloat64 ? 8 : 4; }

// One as dtype has it, in memory order.
uint64_t one_in(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0x3ff0000000000000u;
    case DType::kBFloat16:
      return 0x3f80u;
    case DType::kFloat16:
      return 0x3c00u;
    case DType::kFloat32:
      break;
  }
  return 0x3f800000u;
}

// Rows of ones for every column, with the tables that the kernels read.
class Rows {
 public:
  // shift: elements between an allocation and its first element.
  Rows(DType param, DType accumulator, DType state, int shift) : shift_(shift) {
    const DType wide = is_half(param) ? DType::kFloat32 : param;
    const DType master = param == DType::kBFloat16 ? DType::kBFloat16 : wide;
    const DType dtypes[kNumColumns] = {param, param, accumulator,     state,  state,
                                       state, state, DType::kFloat32, master, wide};
    for (int column = 0; column < kNumColumns; ++column) add_column(column, dtypes[column]);
    int64_t row = 0;
    for (const int64_t size : kSizes) {
      num_elements_.push_back(size);
      for (int64_t begin = 0; begin < size; begin += kChunkElements) {
        chunks_.insert(chunks_.end(), {row, begin, num_slots});
        ++num_slots;
      }
      ++row;
    }
    section_ = {0, num_slots, param, accumulator, state};
    slots.resize(static_cast<size_t>(num_slots));
    biases.resize(2 * std::size(kSizes));
  }

  cuda::Target target() const {
    const cuda::TableView table = {chunks_.data(), num_elements_.data(), addresses_.data(),
                                   static_cast<int64_t>(std::size(kSizes))};
    return {table, &section_, 1, nullptr};
  }

  int64_t num_slots = 0;
  std::vector<double> slots, biases;

 private:
  void add_column(int column, DType dtype) {
    for (const int64_t size : kSizes) {
      const int64_t num = column == kStep ? 1 : size;
      const int64_t skipped = column == kStep ? 0 : shift_ * bytes_of(dtype);
      const size_t num_bytes = static_cast<size_t>(skipped + num * bytes_of(dtype));
      memory_.emplace_back(new char[num_bytes]);
      char* first = memory_.back().get() + skipped;
      const uint64_t one = column == kMaster && dtype == DType::kBFloat16 ? 0 : one_in(dtype);
      const auto width = static_cast<size_t>(bytes_of(dtype));
      for (int64_t i = 0; i < num; ++i) {
        std::memcpy(first + i * bytes_of(dtype), &one, width);  // little-endian
      }
      addresses_.push_back(reinterpret_cast<int64_t>(first));
    }
  }

  int shift_;
  std::vector<std::unique_ptr<char[]>> memory_;
  std::vector<int64_t> chunks_, num_elements_, addresses_;
  cuda::Section section_;
};

void run_gradients(DType param, DType accumulator, int shift) {
  Rows rows(param, accumulator, param, shift);
  const cuda::Target target = rows.target();
  double* slots = rows.slots.data();
  std::vector<double> others(rows.slots.size()), priors(rows.slots.size());
  const double stats[] = {1.0, 0.5, 1.0};
  check(cuda::accumulate({slots, others.data(), priors.data()}, false, target), "accumulate");
  demand(slots[0] == 4.0 && slots[1] == 4.0 * 255 && others[1] == 255, "an accumulation");
  check(cuda::scale(stats, target), "scale");
  check(cuda::sum_squares(slots, target), "sum_squares");
  demand(slots[1] == 255 && priors[1] == 255, "a sum");
  check(cuda::accumulate({nullptr, nullptr, nullptr}, true, target), "store");
  check(cuda::max_abs(slots, target), "max_abs");
  demand(slots[0] == 1.0, "a maximum");
}

void run_updates(DType param, DType accumulator, DType state, int shift) {
  Rows rows(param, accumulator, state, shift);
  const double stats[] = {1.0, 0.5, 1.0};
  for (int flags = 0; flags < 16; ++flags) {
    const bool a = flags & 1, b = flags & 2, c = flags & 4, d = flags & 8;
    const Companions companions = {a, b, c, d, 0.1, 0x123456789abcdefull};
    const AdamScalars adam = {0.1, 0.9, 0.99, 1e-8, d ? 0.1 : 0.0, c, a != b};
    const SgdScalars sgd = {0.1, b ? 0.9 : 0.0, 0.1, c ? 0.1 : 0.0, a, d};
    check(cuda::adam(rows.biases.data(), stats, adam, companions, d, rows.target()), "adam");
    check(cuda::sgd(stats, sgd, companions, d, rows.target()), "sgd");
    if (b) check(cuda::move_average(stats, companions, rows.target()), "move_average");
  }
}

void run_coefficient(int64_t num_slots) {
  const std::vector<double> slots(static_cast<size_t>(num_slots), 4.0);
  std::vector<uint64_t> scratch(static_cast<size_t>(cuda::coefficient_scratch_bytes() / 8));
  for (const bool maxima : {false, true}) {
    double stats[3];
    const cuda::ClipRule rule = {2.0, 1.0, maxima};
    check(cuda::coefficient(stats, scratch.data(), slots.data(), num_slots, rule, nullptr),
          "coefficient");
    const double norm = num_slots == 0 ? 0.0 : maxima ? 2.0 : sqrt(static_cast<double>(num_slots));
    demand(stats[0] == norm, "a norm");
  }
}

}  // namespace

int main() {
  const DType fp32 = DType::kFloat32, fp64 = DType::kFloat64;
  const DType bf16 = DType::kBFloat16, fp16 = DType::kFloat16;
  for (const int shift : {0, 1}) {  // backward what is not aligned
    simulator::machine.block_order = simulator::machine.thread_order = static_cast<uint64_t>(shift);
    for (const DType dtype : {fp32, fp64, bf16, fp16}) {
      run_gradients(dtype, dtype, shift);
      run_updates(dtype, dtype, dtype, shift);
      if (!is_half(dtype)) continue;
      run_gradients(dtype, fp32, shift);
      run_updates(dtype, fp32, fp32, shift);
      run_updates(dtype, fp32, dtype == bf16 ? fp16 : bf16, shift);
    }
    for (const int64_t num_slots : {0, 1, 1024, 1025, 5000}) run_coefficient(num_slots);
  }
  std::printf("%d ops ran\n", num_ops);
  return 0;
}
