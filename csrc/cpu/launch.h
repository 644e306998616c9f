// The ops of the kernel contract over whole tables, on raw pointers.
//
// All of them use the columns that were set before; which ones stands beside each. Results are
// run_to_run deterministic and the same for any number of threads: a chunk is worked on by one
// thread, and sums are added in the order of their slots.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "table.h"

namespace stepclock {

// The instruction set in use: the best this processor has, until use_isa names another.
const Kernels& active_kernels();
// Null, or why the set cannot be used here.
const char* use_isa(const char* name);
// The sets this processor can run, best first; ends with a null.
const char* const* available_isas();

// slots[chunk.slot] = sum of squares of the column's chunk.
void sum_squares(double* slots, const Table& table, Column column, int num_threads);
// slots[chunk.slot] = largest magnitude of the column's chunk.
void max_abs(double* slots, const Table& table, Column column, int num_threads);
// Where the sums of squares of an accumulation go, each slot by slot or null: of the accumulator
// after and before, and of the gradient.
struct AccumulateSlots {
  double* sums;
  double* grad_sums;
  double* prior_sums;
};
// kAccumulator += kGrad (= kGrad where store is set).
void accumulate(const Table& table, bool store, const AccumulateSlots& slots, int num_threads);
// column *= *coefficient
void scale(const Table& table, Column column, const double* coefficient, int num_threads);
// kParam, kExpAvg, kExpAvgSq, kMaxExpAvgSq (amsgrad), kStep; reads kAccumulator. Adds 1 to each
// step.
void adam(const Table& table, const AdamScalars& scalars, const Companions& companions,
          const double* stats, bool maximize, int num_threads);
// kParam, kBuffer (momentum); reads kAccumulator.
void sgd(const Table& table, const SgdScalars& scalars, const Companions& companions,
         const double* stats, bool maximize, int num_threads);
// kAverage; reads kParam and kMaster. stats may be null where it is not gated.
void move_average(const Table& table, const Companions& companions, const double* stats,
                  int num_threads);

// How a window's slots become the number that turns its sum into the gradient.
struct ClipRule {
  double divisor;   // loss scale * total weight
  double max_norm;  // infinity: no clipping
  bool slots_are_maxima;
};
// stats = {norm before the clip, coefficient, clip factor}. Slots are added in index order.
void coefficient(double* stats, const double* slots, int64_t num_slots, const ClipRule& rule);

}  // namespace stepclock
