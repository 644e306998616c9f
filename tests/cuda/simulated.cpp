// The simulated kernels for ctypes: arguments are laid out as in launch.h, results are cudaError_t.
#include "launch.h"

using namespace stepclock;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int simulated_sum_squares(double* slots, const cuda::Target* target) {
  return cuda::sum_squares(slots, *target);
}

EXPORT int simulated_max_abs(double* slots, const cuda::Target* target) {
  return cuda::max_abs(slots, *target);
}

EXPORT int simulated_accumulate(const cuda::AccumulateSlots* slots, bool store,
                                const cuda::Target* target) {
  return cuda::accumulate(*slots, store, *target);
}

EXPORT int simulated_scale(const double* stats, const cuda::Target* target) {
  return cuda::scale(stats, *target);
}

EXPORT int64_t simulated_scratch_bytes() { return cuda::coefficient_scratch_bytes(); }

EXPORT int simulated_coefficient(double* stats, void* scratch, const double* slots,
                                 int64_t num_slots, const cuda::ClipRule* rule) {
  return cuda::coefficient(stats, scratch, slots, num_slots, *rule, nullptr);
}

EXPORT int simulated_adam(double* biases, const double* stats, const AdamScalars* scalars,
                          const Companions* companions, bool maximize, const cuda::Target* target) {
  return cuda::adam(biases, stats, *scalars, *companions, maximize, *target);
}

EXPORT int simulated_sgd(const double* stats, const SgdScalars* scalars,
                         const Companions* companions, bool maximize, const cuda::Target* target) {
  return cuda::sgd(stats, *scalars, *companions, maximize, *target);
}

EXPORT int simulated_move_average(const double* stats, const Companions* companions,
                                  const cuda::Target* target) {
  return cuda::move_average(stats, *companions, *target);
}

// What the last launch died of.
EXPORT const char* simulated_error() { return simulator::machine.error.c_str(); }

EXPORT void simulated_set_order(uint64_t blocks, uint64_t threads) {
  simulator::machine.block_order = blocks;
  simulator::machine.thread_order = threads;
}

// Where elements may lie from now on: ranges in order, apart.
EXPORT void simulated_allow(const simulator::Range* ranges, int64_t num_ranges) {
  simulator::machine.allowed.assign(ranges, ranges + num_ranges);
}

// What was counted since the last time.
EXPORT void simulated_take_counts(simulator::Counts* counts) {
  *counts = simulator::machine.counts;
  simulator::machine.counts = simulator::Counts();
}
