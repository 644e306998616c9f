// The ops of the kernel contract on a stream. Nothing is allocated, nothing waits for the host, and
// every op can be captured into a CUDA graph.
//
// A column that an op uses must be bound in the table. Determinism is gpu_to_gpu: a chunk's slot
// has one writer, and every sum is added in a fixed order.
#pragma once

#ifdef STEPCLOCK_SIMULATOR
#include "cuda_simulator.h"
#else
#include <cuda_runtime_api.h>
#endif

#include <cstdint>

#include "contract.h"
#include "view.h"

namespace stepclock {
namespace cuda {

// Where an op runs.
struct Target {
  TableView table;
  const Section* sections;
  int num_sections;
  cudaStream_t stream;
};

// slots[chunk] = sum of squares of kAccumulator; reads each element once.
cudaError_t sum_squares(double* slots, const Target& target);
// slots[chunk] = largest magnitude of kAccumulator, NaN where there is one.
cudaError_t max_abs(double* slots, const Target& target);

// Each null, or gets a sum of squares a chunk: of the accumulator after and before, and of the
// gradient.
struct AccumulateSlots {
  double* sums;
  double* grad_sums;
  double* prior_sums;
};
// kAccumulator += kGrad (= kGrad where store is set).
cudaError_t accumulate(const AccumulateSlots& slots, bool store, const Target& target);
// kAccumulator *= stats[1]
cudaError_t scale(const double* stats, const Target& target);

// How a window's slots become the number that turns its sum into the gradient.
struct ClipRule {
  double divisor;   // loss scale * total weight
  double max_norm;  // infinity: no clipping
  bool slots_are_maxima;
};
// Bytes of scratch that coefficient needs, zero before its first use; it leaves them as it needs
// them the next time.
int64_t coefficient_scratch_bytes();
// stats = {norm before the clip, coefficient, clip factor}
cudaError_t coefficient(double* stats, void* scratch, const double* slots, int64_t num_slots,
                        const ClipRule& rule, cudaStream_t stream);

// biases: scratch of two doubles a row. Adds 1 to each row's kStep.
cudaError_t adam(double* biases, const double* stats, const AdamScalars& scalars,
                 const Companions& companions, bool maximize, const Target& target);
cudaError_t sgd(const double* stats, const SgdScalars& scalars, const Companions& companions,
                bool maximize, const Target& target);
// kAverage, towards kParam or kMaster.
cudaError_t move_average(const double* stats, const Companions& companions, const Target& target);

}  // namespace cuda
}  // namespace stepclock
