// Adam and AdamW: one pass over everything that an update moves.
//
// Bytes an element: fp32 28; bf16 beside fp32 sums and moments 24, 28 with remainders; 8 more with
// an fp32 average.
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "packs.h"
#include "step_math.h"
#include "update.h"
#include "weights.h"

namespace stepclock {
namespace cuda {
namespace {

using STEPCLOCK_ISA::AdamStep;

struct Biases {
  double bias1, bias2;  // 1 - beta^t
};

__global__ void advance_steps_kernel(Biases* biases, TableView table, const double* stats,
                                     AdamScalars scalars, Companions companions) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= table.num_rows || is_shut(companions, stats)) return;
  float* step = reinterpret_cast<float*>(find_column(table, kStep, row));
  const float now = *step + 1.0f;
  *step = now;
  biases[row] = Biases{1.0 - pow(scalars.beta1, static_cast<double>(now)),
                       1.0 - pow(scalars.beta2, static_cast<double>(now))};
}

struct Moments {
  char* exp_avg;
  char* exp_avg_sq;
  char* max_exp_avg_sq;
};

struct AdamLaunch {
  AdamScalars scalars;
  Companions companions;
  DType accumulator, state;
  bool decoupled, maximize;
};

template <typename C>
__device__ inline AdamStep<C> make_step(const AdamLaunch& l, const Biases& bias,
                                        double coefficient) {
  const AdamScalars& s = l.scalars;
  return {C(l.maximize ? -coefficient : coefficient),
          C(s.beta2),
          C(1.0 - s.beta1),
          C(1.0 - s.beta2),
          C(s.eps),
          C(l.decoupled ? 1.0 - s.lr * s.weight_decay : s.weight_decay),
          C(s.lr / bias.bias1),
          C(1.0 / sqrt(bias.bias2))};
}

// W: how parameters are kept; A and S: dtypes of sums and moments (Known or Runtime).
template <typename W, typename A, typename S, bool kExtras, int N>
__device__ inline void adam_pack(const WeightColumns& w, const Moments& moments, const char* sums,
                                 int64_t i, const AdamLaunch& l,
                                 const AdamStep<typename W::C>& step, uint32_t key,
                                 int64_t offset) {
  using C = typename W::C;
  const A accumulator(l.accumulator);
  const S state(l.state);
  C p[N], g[N], m[N], v[N], largest[N];
  W::load(w, i, p);
  accumulator.load(sums, i, g);
  state.load(moments.exp_avg, i, m);
  state.load(moments.exp_avg_sq, i, v);
  const bool amsgrad = kExtras && l.scalars.amsgrad;
  if (amsgrad) state.load(moments.max_exp_avg_sq, i, largest);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (amsgrad) {
      l.decoupled
          ? STEPCLOCK_ISA::adam_element<true, true>(p[k], g[k], m[k], v[k], largest[k], step)
          : STEPCLOCK_ISA::adam_element<false, true>(p[k], g[k], m[k], v[k], largest[k], step);
    } else {
      C none{0};
      l.decoupled ? STEPCLOCK_ISA::adam_element<true, false>(p[k], g[k], m[k], v[k], none, step)
                  : STEPCLOCK_ISA::adam_element<false, false>(p[k], g[k], m[k], v[k], none, step);
    }
  }
  state.store(moments.exp_avg, i, m);
  state.store(moments.exp_avg_sq, i, v);
  if (amsgrad) state.store(moments.max_exp_avg_sq, i, largest);
  finish_pack<W, kExtras>(w, i, p, l.companions, key, offset);
}

// Elements of a pack: four of 16 bits where dtypes are chosen at run time, since eight would not
// stay in 64 registers.
template <typename W, typename S>
constexpr int kAdamPackOf =
    std::is_same_v<S, Runtime> && kPackOf<typename W::Param> > 4 ? 4 : kPackOf<typename W::Param>;

template <typename W, typename A, typename S, bool kExtras>
__global__ void __launch_bounds__(kUpdateThreads, kBlocksPerMultiprocessor)
    adam_kernel(TableView table, int64_t first_chunk, const Biases* biases, const double* stats,
                AdamLaunch l) {
  if (is_shut(l.companions, stats)) return;
  const Span span = find_span(table, first_chunk, kUpdateParts);
  const WeightColumns w = find_weights(table, span.row, l.companions);
  const char* sums = find_column(table, kAccumulator, span.row);
  const Moments moments = {find_column(table, kExpAvg, span.row),
                           find_column(table, kExpAvgSq, span.row),
                           find_column(table, kMaxExpAvgSq, span.row, l.scalars.amsgrad)};
  const AdamStep<typename W::C> step = make_step<typename W::C>(l, biases[span.row], stats[1]);
  const uint32_t key =
      kExtras ? STEPCLOCK_ISA::chunk_key(l.companions.rounding_key, span.slot) : 0u;
  const bool aligned = are_aligned(w) && is_aligned(sums) && is_aligned(moments.exp_avg) &&
                       is_aligned(moments.exp_avg_sq) && is_aligned(moments.max_exp_avg_sq);
  for_each_pack<kAdamPackOf<W, S>>(span, aligned, [&](int64_t i, auto count) {
    adam_pack<W, A, S, kExtras, decltype(count)::value>(w, moments, sums, i, l, step, key,
                                                        span.offset + i - span.begin);
  });
}

struct AdamRun : Run {
  const Biases* biases;
  const AdamLaunch& launched;

  AdamRun(const Run& run, const Biases* b, const AdamLaunch& l)
      : Run(run), biases(b), launched(l) {}

  template <typename W, typename A, typename S, bool kExtras>
  cudaError_t with() const {
    return launch(adam_kernel<W, A, S, kExtras>, section.num_chunks * kUpdateParts, kUpdateThreads,
                  target.stream, target.table, section.first_chunk, biases, stats, launched);
  }
};

}  // namespace

cudaError_t adam(double* biases, const double* stats, const AdamScalars& scalars,
                 const Companions& companions, bool maximize, const Target& target) {
  auto* rows = reinterpret_cast<Biases*>(biases);
  const int64_t num_blocks = (target.table.num_rows + kUpdateThreads - 1) / kUpdateThreads;
  cudaError_t error = launch(advance_steps_kernel, num_blocks, kUpdateThreads, target.stream, rows,
                             target.table, stats, scalars, companions);
  for (int k = 0; k < target.num_sections && error == cudaSuccess; ++k) {
    const Section& section = target.sections[k];
    const Companions own = narrowed(companions, section);
    // Adam without decay takes the decoupled path with a factor of one, which changes nothing.
    const bool decoupled = scalars.decoupled || scalars.weight_decay == 0.0;
    const AdamLaunch l = {scalars, own, section.accumulator, section.state, decoupled, maximize};
    const bool extras = own.has_averages || own.stochastic || scalars.amsgrad;
    error = choose(Types{section, own.has_masters, extras},
                   AdamRun(Run{section, target, stats}, rows, l));
  }
  return error;
}

}  // namespace cuda
}  // namespace stepclock
