// Adam, SGD and the averages: one pass over everything that an update moves.
//
// Bytes an element: AdamW fp32 28; bf16 beside fp32 sums and moments 24, 28 with remainders; 8 more
// with an fp32 average. No sum is taken, so four blocks share a chunk. Compiled without fused
// multiply-add: the bits are those of the CPU.
#include <cmath>
#include <cstdint>

#include "launch.h"
#include "packs.h"
#include "step_math.h"
#include "weights.h"

namespace stepclock {
namespace cuda {
namespace {

using STEPCLOCK_ISA::AdamStep;
using STEPCLOCK_ISA::SgdStep;

constexpr int kUpdateThreads = 256;
// At most 64 registers a thread, so that half of a multiprocessor's threads are there.
constexpr int kBlocksPerMultiprocessor = 4;
constexpr int kUpdateParts = 4;

__device__ inline bool is_shut(const Companions& companions, const double* stats) {
  return companions.gated && !isfinite(stats[0]);
}

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

__device__ inline WeightColumns find_weights(const TableView& table, int64_t row,
                                             const Companions& companions) {
  return WeightColumns{find_column(table, kParam, row),
                       companions.has_masters ? find_column(table, kMaster, row) : nullptr,
                       companions.has_averages ? find_column(table, kAverage, row) : nullptr};
}

// A null column is aligned.
__device__ inline bool are_aligned(const WeightColumns& w) {
  return is_aligned(w.param) && is_aligned(w.master) && is_aligned(w.average);
}

// Stores a pack of parameters, and moves their average. kExtras: there may be an average, or
// stochastic rounding.
template <typename W, bool kExtras, int N, typename C>
__device__ inline void finish_pack(const WeightColumns& w, int64_t i, C (&values)[N],
                                   const Companions& companions, uint32_t key, int64_t offset) {
  if (kExtras && companions.stochastic) {
    W::store_stochastically(w, i, values, key, static_cast<uint32_t>(offset));
  } else {
    W::store(w, i, values);
  }
  if (kExtras && w.average != nullptr) {
    move_average_pack(w.average, i, values, static_cast<C>(companions.average_weight));
  }
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

template <typename W, typename A, typename S, bool kExtras>
__global__ void __launch_bounds__(kUpdateThreads, kBlocksPerMultiprocessor)
    adam_kernel(TableView table, int64_t first_chunk, const Biases* biases, const double* stats,
                AdamLaunch l) {
  if (is_shut(l.companions, stats)) return;
  const Span span = find_span(table, first_chunk, kUpdateParts);
  const WeightColumns w = find_weights(table, span.row, l.companions);
  const char* sums = find_column(table, kAccumulator, span.row);
  const Moments moments = {
      find_column(table, kExpAvg, span.row), find_column(table, kExpAvgSq, span.row),
      l.scalars.amsgrad ? find_column(table, kMaxExpAvgSq, span.row) : nullptr};
  const AdamStep<typename W::C> step = make_step<typename W::C>(l, biases[span.row], stats[1]);
  const uint32_t key =
      kExtras ? STEPCLOCK_ISA::chunk_key(l.companions.rounding_key, span.slot) : 0u;
  const bool aligned = are_aligned(w) && is_aligned(sums) && is_aligned(moments.exp_avg) &&
                       is_aligned(moments.exp_avg_sq) && is_aligned(moments.max_exp_avg_sq);
  for_each_pack<kPackOf<typename W::Param>>(span, aligned, [&](int64_t i, auto count) {
    adam_pack<W, A, S, kExtras, decltype(count)::value>(w, moments, sums, i, l, step, key,
                                                        span.offset + i - span.begin);
  });
}

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
  char* buffer = l.scalars.momentum != 0.0 ? find_column(table, kBuffer, span.row) : nullptr;
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

template <typename W>
__global__ void __launch_bounds__(kUpdateThreads)
    move_average_kernel(TableView table, int64_t first_chunk, const double* stats,
                        Companions companions) {
  if (is_shut(companions, stats)) return;
  using C = typename W::C;
  const Span span = find_span(table, first_chunk, kUpdateParts);
  const WeightColumns w = find_weights(table, span.row, companions);
  const C weight = static_cast<C>(companions.average_weight);
  for_each_pack<kPackOf<typename W::Param>>(span, are_aligned(w), [&](int64_t i, auto count) {
    C values[decltype(count)::value];
    W::load(w, i, values);
    move_average_pack(w.average, i, values, weight);
  });
}

struct Types {
  const Section& section;
  bool has_masters, has_extras;
};

// Calls run.template with<W, A, S, kExtras>() for a section: dtypes that are the rule are known
// when the kernels are compiled, any others when they run.
template <typename W, typename Run>
cudaError_t choose_columns(const Types& types, const Run& run) {
  using T = typename W::Param;
  constexpr DType kOwn = Run::template dtype_of<T>();
  const DType sums = types.section.accumulator, state = types.section.state;
  if constexpr (kOwn == DType::kFloat64) {
    return run.template with<W, Known<T>, Known<T>, true>();
  } else {
    const bool wide = sums == DType::kFloat32 && state == DType::kFloat32;
    if (wide && !types.has_extras) return run.template with<W, Known<float>, Known<float>, false>();
    if (wide) return run.template with<W, Known<float>, Known<float>, true>();
    return run.template with<W, Runtime, Runtime, true>();
  }
}

template <typename Run>
cudaError_t choose(const Types& types, const Run& run) {
  switch (types.section.param) {
    case DType::kFloat64:
      return choose_columns<PlainWeights<double>>(types, run);
    case DType::kBFloat16:
      return types.has_masters ? choose_columns<RemainderWeights>(types, run)
                               : choose_columns<PlainWeights<BFloat16>>(types, run);
    case DType::kFloat16:
      return types.has_masters ? choose_columns<CopyWeights>(types, run)
                               : choose_columns<PlainWeights<Float16>>(types, run);
    case DType::kFloat32:
      break;
  }
  return choose_columns<PlainWeights<float>>(types, run);
}

template <typename T>
constexpr DType type_code();
template <>
constexpr DType type_code<float>() {
  return DType::kFloat32;
}
template <>
constexpr DType type_code<double>() {
  return DType::kFloat64;
}
template <>
constexpr DType type_code<BFloat16>() {
  return DType::kBFloat16;
}
template <>
constexpr DType type_code<Float16>() {
  return DType::kFloat16;
}

struct Run {
  const Section& section;
  const Target& target;
  const double* stats;

  template <typename T>
  static constexpr DType dtype_of() {
    return type_code<T>();
  }
};

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

struct SgdRun : Run {
  const SgdLaunch& launched;

  SgdRun(const Run& run, const SgdLaunch& l) : Run(run), launched(l) {}

  template <typename W, typename A, typename S, bool kExtras>
  cudaError_t with() const {
    return launch(sgd_kernel<W, A, S, kExtras>, section.num_chunks * kUpdateParts, kUpdateThreads,
                  target.stream, target.table, section.first_chunk, stats, launched);
  }
};

// The companions of a section: rows wider than 16 bits have no masters and round to nearest.
Companions narrowed(Companions companions, const Section& section) {
  companions.has_masters = companions.has_masters && is_half(section.param);
  companions.stochastic =
      companions.stochastic && is_half(section.param) && !companions.has_masters;
  return companions;
}

template <typename W>
cudaError_t launch_average(const Run& run, const Companions& companions) {
  return launch(move_average_kernel<W>, run.section.num_chunks * kUpdateParts, kUpdateThreads,
                run.target.stream, run.target.table, run.section.first_chunk, run.stats,
                companions);
}

cudaError_t average_section(const Run& run, const Companions& companions) {
  switch (run.section.param) {
    case DType::kFloat64:
      return launch_average<PlainWeights<double>>(run, companions);
    case DType::kBFloat16:
      return companions.has_masters ? launch_average<RemainderWeights>(run, companions)
                                    : launch_average<PlainWeights<BFloat16>>(run, companions);
    case DType::kFloat16:
      return companions.has_masters ? launch_average<CopyWeights>(run, companions)
                                    : launch_average<PlainWeights<Float16>>(run, companions);
    case DType::kFloat32:
      break;
  }
  return launch_average<PlainWeights<float>>(run, companions);
}

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

cudaError_t move_average(const double* stats, const Companions& companions, const Target& target) {
  for (int k = 0; k < target.num_sections; ++k) {
    const Section& section = target.sections[k];
    const cudaError_t error =
        average_section(Run{section, target, stats}, narrowed(companions, section));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace stepclock
