// SGD: one pass over everything that an update moves. Bytes an element, fp32: 12, with momentum 20.
#include <cstdint>

#include "launch.h"
#include "packs.h"
#include "step_math.h"
#include "update.h"
#include "weights.h"

namespace stepclock {
namespace cuda {
namespace {

using STEPCLOCK_ISA::SgdStep;

struct SgdLaunch {
  SgdScalars scalars;
  Companions companions;
  DType accumulator, state;
  bool maximize;
};

template <int N, typename C>
__device__ inline void sgd_elements(C (&p)[N], const C (&g)[N], C (&b)[N], const SgdScalars& s,
                                    const SgdStep<C>& step) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    // The element functions leave the decay out where it is 0, so that 0 * inf is not taken.
    const bool decay = s.weight_decay != 0.0;
    if (s.momentum == 0.0) {
      decay ? STEPCLOCK_ISA::sgd_element<true, false, false, false>(p[k], g[k], b[k], step)
            : STEPCLOCK_ISA::sgd_element<false, false, false, false>(p[k], g[k], b[k], step);
    } else if (s.first) {
      if (s.nesterov) {
        decay ? STEPCLOCK_ISA::sgd_element<true, true, true, true>(p[k], g[k], b[k], step)
              : STEPCLOCK_ISA::sgd_element<false, true, true, true>(p[k], g[k], b[k], step);
      } else {
        decay ? STEPCLOCK_ISA::sgd_element<true, true, true, false>(p[k], g[k], b[k], step)
              : STEPCLOCK_ISA::sgd_element<false, true, true, false>(p[k], g[k], b[k], step);
      }
    } else if (s.nesterov) {
      decay ? STEPCLOCK_ISA::sgd_element<true, true, false, true>(p[k], g[k], b[k], step)
            : STEPCLOCK_ISA::sgd_element<false, true, false, true>(p[k], g[k], b[k], step);
    } else {
      decay ? STEPCLOCK_ISA::sgd_element<true, true, false, false>(p[k], g[k], b[k], step)
            : STEPCLOCK_ISA::sgd_element<false, true, false, false>(p[k], g[k], b[k], step);
    }
  }
}

template <typename W, typename A, typename S, bool kExtras, int N>
__device__ inline void sgd_pack(const WeightColumns& w, char* buffer, const char* sums, int64_t i,
                                const SgdLaunch& l, const SgdStep<typename W::C>& step,
                                uint32_t key, int64_t offset) {
  using C = typename W::C;
  const A accumulator(l.accumulator);
  const S state(l.state);
  C p[N], g[N], b[N];
  W::load(w, i, p);
  accumulator.load(sums, i, g);
  if (buffer != nullptr && !l.scalars.first) state.load(buffer, i, b);
  sgd_elements(p, g, b, l.scalars, step);
  if (buffer != nullptr) state.store(buffer, i, b);
  finish_pack<W, kExtras>(w, i, p, l.companions, key, offset);
}

template <typename W, typename A, typename S, bool kExtras>
__global__ void __launch_bounds__(kUpdateThreads, kBlocksPerMultiprocessor)
    sgd_kernel(TableView table, int64_t first_chunk, const double* stats, SgdLaunch l) {
  if (is_shut(l.companions, stats)) return;
  using C = typename W::C;
  const Span span = find_span(table, first_chunk, kUpdateParts);
  const WeightColumns w = find_weights(table, span.row, l.companions);
  const char* sums = find_column(table, kAccumulator, span.row);
  char* buffer = find_column(table, kBuffer, span.row, l.scalars.momentum != 0.0);
  const SgdScalars& s = l.scalars;
  const SgdStep<C> step = {C(l.maximize ? -stats[1] : stats[1]), C(s.lr), C(s.momentum),
                           C(1.0 - s.dampening), C(s.weight_decay)};
  const uint32_t key =
      kExtras ? STEPCLOCK_ISA::chunk_key(l.companions.rounding_key, span.slot) : 0u;
  const bool aligned = are_aligned(w) && is_aligned(sums) && is_aligned(buffer);
  for_each_pack<kPackOf<typename W::Param>>(span, aligned, [&](int64_t i, auto count) {
    sgd_pack<W, A, S, kExtras, decltype(count)::value>(w, buffer, sums, i, l, step, key,
                                                       span.offset + i - span.begin);
  });
}

struct SgdRun : Run {
  const SgdLaunch& launched;

  SgdRun(const Run& run, const SgdLaunch& l) : Run(run), launched(l) {}

  template <typename W, typename A, typename S, bool kExtras>
  cudaError_t with() const {
    return launch(sgd_kernel<W, A, S, kExtras>, section.num_chunks * kUpdateParts, kUpdateThreads,
                  target.stream, target.table, section.first_chunk, stats, launched);
  }
};

}  // namespace

cudaError_t sgd(const double* stats, const SgdScalars& scalars, const Companions& companions,
                bool maximize, const Target& target) {
  cudaError_t error = cudaSuccess;
  for (int k = 0; k < target.num_sections && error == cudaSuccess; ++k) {
    const Section& section = target.sections[k];
    const Companions own = narrowed(companions, section);
    const SgdLaunch l = {scalars, own, section.accumulator, section.state, maximize};
    const bool extras = own.has_averages || own.stochastic;
    error = choose(Types{section, own.has_masters, extras}, SgdRun(Run{section, target, stats}, l));
  }
  return error;
}

}  // namespace cuda
}  // namespace stepclock
