// Runs the kernels of one chunk over a table's chunks, and chooses their instruction set.
#include "launch.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "rounding.h"
#include "threads.h"

namespace stepclock {
namespace {

const Kernels* const* usable_kernels() {
  static const Kernels* usable[4] = {};
  static const bool filled = [] {
    int count = 0;
#ifdef STEPCLOCK_X86
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      usable[count++] = &avx512::kernels();
    }
    if (__builtin_cpu_supports("avx2")) usable[count++] = &avx2::kernels();
#endif
    usable[count] = &baseline::kernels();
    return true;
  }();
  static_cast<void>(filled);
  return usable;
}

const Kernels*& active() {
  static const Kernels* chosen = usable_kernels()[0];
  return chosen;
}

template <typename Body>
void for_each_chunk(const Table& table, int num_threads, const Body& body) {
  const std::vector<Chunk>& chunks = table.chunks();
  const auto range = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(chunks[i]);
  };
  parallel_chunks(static_cast<int64_t>(chunks.size()), table.useful_threads(num_threads), range);
}

Weights weights_of(const Table& table, const Chunk& chunk, const Companions& companions) {
  const DType dtype = table.dtype(kParam, chunk.row);
  const bool has_master = companions.has_masters && is_half(dtype);
  return Weights{table.at(kParam, chunk),
                 dtype,
                 has_master ? table.at(kMaster, chunk) : nullptr,
                 companions.has_averages ? table.at(kAverage, chunk) : nullptr,
                 companions.average_weight,
                 companions.stochastic && !has_master,
                 baseline::chunk_key(companions.rounding_key, chunk.slot)};
}

// Whether a gated update must not happen: the norm, stats[0], is not finite.
bool is_shut(const Companions& companions, const double* stats) {
  return companions.gated && !std::isfinite(stats[0]);
}

struct Biases {
  double bias1, bias2;
};

// Moves each parameter's own step counter on, and returns 1 - beta^step for both betas.
std::vector<Biases> advance_steps(const Table& table, const AdamScalars& scalars) {
  std::vector<Biases> biases(static_cast<size_t>(table.num_rows()));
  float last_step = 0.0f;  // most parameters share their step: two pow() for all of them
  Biases last{1.0, 1.0};
  for (int64_t row = 0; row < table.num_rows(); ++row) {
    float& step = *table.scalar(kStep, row);
    step += 1.0f;
    if (step != last_step) {
      last_step = step;
      last = Biases{1.0 - std::pow(scalars.beta1, static_cast<double>(step)),
                    1.0 - std::pow(scalars.beta2, static_cast<double>(step))};
    }
    biases[static_cast<size_t>(row)] = last;
  }
  return biases;
}

}  // namespace

const Kernels& active_kernels() { return *active(); }

const char* use_isa(const char* name) {
  for (const Kernels* const* kernels = usable_kernels(); *kernels != nullptr; ++kernels) {
    if (std::strcmp((*kernels)->name, name) == 0) {
      active() = *kernels;
      return nullptr;
    }
  }
  return "this processor or this build does not have it";
}

const char* const* available_isas() {
  static const char* names[4] = {};
  for (int i = 0; usable_kernels()[i] != nullptr; ++i) names[i] = usable_kernels()[i]->name;
  return names;
}

void sum_squares(double* slots, const Table& table, Column column, int num_threads) {
  const Kernels& kernels = active_kernels();
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const DType dtype = table.dtype(column, chunk.row);
    slots[chunk.slot] = kernels.sum_squares(dtype, table.at(column, chunk), chunk.num_elements);
  });
}

void max_abs(double* slots, const Table& table, Column column, int num_threads) {
  const Kernels& kernels = active_kernels();
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const DType dtype = table.dtype(column, chunk.row);
    slots[chunk.slot] = kernels.max_abs(dtype, table.at(column, chunk), chunk.num_elements);
  });
}

void accumulate(const Table& table, bool store, const AccumulateSlots& slots, int num_threads) {
  const Kernels& kernels = active_kernels();
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const AccumulateChunk accumulate_chunk = {table.at(kAccumulator, chunk),
                                              table.dtype(kAccumulator, chunk.row),
                                              table.at(kGrad, chunk),
                                              table.dtype(kGrad, chunk.row),
                                              chunk.num_elements,
                                              store,
                                              slots.sums != nullptr,
                                              slots.grad_sums != nullptr,
                                              slots.prior_sums != nullptr};
    const AccumulateSums sums = kernels.accumulate(accumulate_chunk);
    if (slots.sums != nullptr) slots.sums[chunk.slot] = sums.sum;
    if (slots.grad_sums != nullptr) slots.grad_sums[chunk.slot] = sums.grad_sum;
    if (slots.prior_sums != nullptr) slots.prior_sums[chunk.slot] = sums.prior_sum;
  });
}

void scale(const Table& table, Column column, const double* coefficient, int num_threads) {
  const Kernels& kernels = active_kernels();
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const DType dtype = table.dtype(column, chunk.row);
    kernels.scale(dtype, table.at(column, chunk), chunk.num_elements, *coefficient);
  });
}

void adam(const Table& table, const AdamScalars& scalars, const Companions& companions,
          const double* stats, bool maximize, int num_threads) {
  if (is_shut(companions, stats)) return;
  const Kernels& kernels = active_kernels();
  const double signed_coefficient = maximize ? -stats[1] : stats[1];
  const std::vector<Biases> biases = advance_steps(table, scalars);
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const Biases& bias = biases[static_cast<size_t>(chunk.row)];
    const AdamChunk adam_chunk = {weights_of(table, chunk, companions),
                                  table.at(kAccumulator, chunk),
                                  table.dtype(kAccumulator, chunk.row),
                                  table.dtype(kExpAvg, chunk.row),
                                  table.at(kExpAvg, chunk),
                                  table.at(kExpAvgSq, chunk),
                                  table.at(kMaxExpAvgSq, chunk),
                                  chunk.num_elements,
                                  bias.bias1,
                                  bias.bias2};
    kernels.adam(adam_chunk, scalars, signed_coefficient);
  });
}

void sgd(const Table& table, const SgdScalars& scalars, const Companions& companions,
         const double* stats, bool maximize, int num_threads) {
  if (is_shut(companions, stats)) return;
  const Kernels& kernels = active_kernels();
  const double signed_coefficient = maximize ? -stats[1] : stats[1];
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    const SgdChunk sgd_chunk = {weights_of(table, chunk, companions),
                                table.at(kAccumulator, chunk),
                                table.dtype(kAccumulator, chunk.row),
                                table.dtype(kBuffer, chunk.row),
                                scalars.momentum != 0.0 ? table.at(kBuffer, chunk) : nullptr,
                                chunk.num_elements};
    kernels.sgd(sgd_chunk, scalars, signed_coefficient);
  });
}

void move_average(const Table& table, const Companions& companions, const double* stats,
                  int num_threads) {
  if (is_shut(companions, stats)) return;
  const Kernels& kernels = active_kernels();
  for_each_chunk(table, num_threads, [&](const Chunk& chunk) {
    kernels.move_average(weights_of(table, chunk, companions), chunk.num_elements);
  });
}

void coefficient(double* stats, const double* slots, int64_t num_slots, const ClipRule& rule) {
  double total = 0.0;
  for (int64_t i = 0; i < num_slots; ++i) {
    if (rule.slots_are_maxima) {
      total = slots[i] > total || slots[i] != slots[i] ? slots[i] : total;  // a NaN stays
    } else {
      total += slots[i];
    }
  }
  const double norm = (rule.slots_are_maxima ? total : std::sqrt(total)) / rule.divisor;
  // torch's rule: min(1, max_norm / (norm + 1e-6)), where a NaN norm gives a NaN factor.
  const double ratio = std::isinf(rule.max_norm) ? 1.0 : rule.max_norm / (norm + 1e-6);
  const double clip = ratio >= 1.0 ? 1.0 : ratio;
  stats[0] = norm;
  stats[1] = clip / rule.divisor;
  stats[2] = clip;
}

}  // namespace stepclock
