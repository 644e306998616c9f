// Kernels of one chunk. Compiled once for each instruction set (see isa.h).
//
// Bytes moved, fp32: sum_squares 4 an element, accumulate 12 (8 when it stores), scale 8, adam 28,
// sgd 12 or 20, 8 more with an average. bf16 beside fp32 sums and moments: accumulate 10, adam 24,
// 28 with remainders. Bits: no contraction to fused multiply-add and a fixed number of partial
// sums, so that every instruction set gives the same result.
#include "kernels.h"

#include "columns.h"
#include "half.h"
#include "isa.h"
#include "reductions.h"
#include "step_math.h"

namespace stepclock {
namespace STEPCLOCK_ISA {
namespace {

template <typename C>
void add_or_store(C* __restrict accumulator, const C* __restrict grad, int64_t n, bool store_only) {
  if (store_only) {
    for (int64_t i = 0; i < n; ++i) accumulator[i] = grad[i];
  } else {
    for (int64_t i = 0; i < n; ++i) accumulator[i] += grad[i];
  }
}

// The sums of squares that an accumulation was asked for.
struct SumsOfSquares {
  Lanes sum, grad, prior;

  AccumulateSums totals() const { return {sum.total(), grad.total(), prior.total()}; }
};

// One block: the squares before, of the gradient and after are taken while it is in the cache.
template <typename C>
void accumulate_block(SumsOfSquares& sums, const AccumulateChunk& chunk, int64_t begin, int64_t n) {
  C accumulator_block[kBlockElements], grad_block[kBlockElements];
  const DType dtype = chunk.accumulator_dtype;
  C* accumulator = open_column(dtype, chunk.accumulator, begin, n, accumulator_block, !chunk.store);
  // What is stored in fp32 is widened to where it stays.
  C* wide = chunk.store && !is_half(dtype) ? accumulator : grad_block;
  const C* grad = read_column(chunk.grad_dtype, chunk.grad, begin, n, wide);
  if (chunk.wants_grad_sum) sums.grad.add(grad, n);
  if (chunk.wants_prior_sum && !chunk.store) sums.prior.add(accumulator, n);
  if (chunk.wants_sum && !chunk.store && !is_half(dtype)) {  // what is stored is not rounded
    return sums.sum.accumulate(accumulator, grad, n);
  }
  if (grad != accumulator) add_or_store(accumulator, grad, n, chunk.store);
  write_column(dtype, chunk.accumulator, begin, n, accumulator);
  if (!chunk.wants_sum) return;
  sums.sum.add(read_column(dtype, chunk.accumulator, begin, n, accumulator_block), n);
}

template <typename C>
AccumulateSums accumulate(const AccumulateChunk& chunk) {
  SumsOfSquares sums;
  for (int64_t begin = 0; begin < chunk.num_elements; begin += kBlockElements) {
    const int64_t size = smaller(kBlockElements, chunk.num_elements - begin);
    accumulate_block<C>(sums, chunk, begin, size);
  }
  return sums.totals();
}

template <typename T, typename C>
void scale(T* x, int64_t n, C factor) {
  for (int64_t i = 0; i < n; ++i) store(x, i, load(x, i) * factor);
}

template <bool kDecoupled, bool kAmsgrad, typename C>
void adam_loop(C* __restrict param, const C* __restrict sum, C* __restrict exp_avg,
               C* __restrict exp_avg_sq, C* __restrict max_exp_avg_sq, int64_t n,
               const AdamStep<C>& step) {
  const AdamStep<C> s = step;
  for (int64_t i = 0; i < n; ++i) {
    C p = param[i];
    C m = exp_avg[i];
    C v = exp_avg_sq[i];
    C largest = kAmsgrad ? max_exp_avg_sq[i] : C{0};
    adam_element<kDecoupled, kAmsgrad>(p, sum[i], m, v, largest, s);
    param[i] = p;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if (kAmsgrad) max_exp_avg_sq[i] = largest;
  }
}

template <typename C>
using AdamLoop = void (*)(C*, const C*, C*, C*, C*, int64_t, const AdamStep<C>&);

template <typename C>
AdamLoop<C> choose_adam_loop(bool decoupled, bool amsgrad) {
  if (amsgrad) return decoupled ? adam_loop<true, true, C> : adam_loop<false, true, C>;
  return decoupled ? adam_loop<true, false, C> : adam_loop<false, false, C>;
}

template <typename C>
AdamStep<C> adam_step(const AdamChunk& chunk, const AdamScalars& scalars, bool decoupled,
                      double coefficient) {
  return {
      C(coefficient),
      C(scalars.beta2),
      C(1.0 - scalars.beta1),
      C(1.0 - scalars.beta2),
      C(scalars.eps),
      C(decoupled ? 1.0 - scalars.lr * scalars.weight_decay : scalars.weight_decay),
      C(scalars.lr / chunk.bias1),
      C(1.0 / __builtin_sqrt(chunk.bias2)),
  };
}

template <typename C>
void adam(const AdamChunk& c, const AdamScalars& scalars, double coefficient) {
  // Adam without decay takes the decoupled path with a factor of one, which changes nothing.
  const bool decoupled = scalars.decoupled || scalars.weight_decay == 0.0;
  const AdamStep<C> step = adam_step<C>(c, scalars, decoupled, coefficient);
  const AdamLoop<C> loop = choose_adam_loop<C>(decoupled, scalars.amsgrad);
  const int64_t block = block_size(c.weights, c.accumulator_dtype, c.state_dtype, c.num_elements);
  C params[kUpdateElements], sums[kUpdateElements], moments[3][kUpdateElements];
  for (int64_t begin = 0; begin < c.num_elements; begin += block) {
    const int64_t n = smaller(block, c.num_elements - begin);
    C* p = open_weights(c.weights, begin, n, params);
    const C* sum = read_column(c.accumulator_dtype, c.accumulator, begin, n, sums);
    C* m = open_column(c.state_dtype, c.exp_avg, begin, n, moments[0]);
    C* v = open_column(c.state_dtype, c.exp_avg_sq, begin, n, moments[1]);
    C* largest = nullptr;
    if (scalars.amsgrad) {
      largest = open_column(c.state_dtype, c.max_exp_avg_sq, begin, n, moments[2]);
    }
    loop(p, sum, m, v, largest, n, step);
    write_weights(c.weights, begin, n, p);
    write_column(c.state_dtype, c.exp_avg, begin, n, m);
    write_column(c.state_dtype, c.exp_avg_sq, begin, n, v);
    if (scalars.amsgrad) write_column(c.state_dtype, c.max_exp_avg_sq, begin, n, largest);
    if (c.weights.average != nullptr) move_average(c.weights, begin, n, params);
  }
}

template <bool kDecay, bool kMomentum, bool kFirst, bool kNesterov, typename C>
void sgd_loop(C* __restrict param, const C* __restrict sum, C* __restrict buffer, int64_t n,
              const SgdStep<C>& step) {
  const SgdStep<C> s = step;
  for (int64_t i = 0; i < n; ++i) {
    C p = param[i];
    C b = kMomentum && !kFirst ? buffer[i] : C{0};
    sgd_element<kDecay, kMomentum, kFirst, kNesterov>(p, sum[i], b, s);
    param[i] = p;
    if (kMomentum) buffer[i] = b;
  }
}

template <typename C>
using SgdLoop = void (*)(C*, const C*, C*, int64_t, const SgdStep<C>&);

template <bool kDecay, typename C>
SgdLoop<C> choose_sgd_loop(bool momentum, bool first, bool nesterov) {
  if (!momentum) return sgd_loop<kDecay, false, false, false, C>;
  if (first) {
    return nesterov ? sgd_loop<kDecay, true, true, true, C>
                    : sgd_loop<kDecay, true, true, false, C>;
  }
  return nesterov ? sgd_loop<kDecay, true, false, true, C>
                  : sgd_loop<kDecay, true, false, false, C>;
}

template <typename C>
void sgd(const SgdChunk& c, const SgdScalars& scalars, double coefficient) {
  const SgdStep<C> step = {C(coefficient), C(scalars.lr), C(scalars.momentum),
                           C(1.0 - scalars.dampening), C(scalars.weight_decay)};
  const bool momentum = c.buffer != nullptr;
  const SgdLoop<C> loop = scalars.weight_decay == 0.0
                              ? choose_sgd_loop<false, C>(momentum, scalars.first, scalars.nesterov)
                              : choose_sgd_loop<true, C>(momentum, scalars.first, scalars.nesterov);
  const DType state = momentum ? c.state_dtype : c.weights.dtype;
  const int64_t block = block_size(c.weights, c.accumulator_dtype, state, c.num_elements);
  C params[kUpdateElements], sums[kUpdateElements], buffers[kUpdateElements];
  for (int64_t begin = 0; begin < c.num_elements; begin += block) {
    const int64_t n = smaller(block, c.num_elements - begin);
    C* p = open_weights(c.weights, begin, n, params);
    const C* sum = read_column(c.accumulator_dtype, c.accumulator, begin, n, sums);
    C* buffer = nullptr;
    if (momentum) buffer = open_column(state, c.buffer, begin, n, buffers, !scalars.first);
    loop(p, sum, buffer, n, step);
    write_weights(c.weights, begin, n, p);
    if (momentum) write_column(state, c.buffer, begin, n, buffer);
    if (c.weights.average != nullptr) move_average(c.weights, begin, n, params);
  }
}

template <typename C>
void move_averages(const Weights& weights, int64_t num_elements) {
  C block[kUpdateElements];
  for (int64_t begin = 0; begin < num_elements; begin += kUpdateElements) {
    move_average(weights, begin, smaller(kUpdateElements, num_elements - begin), block);
  }
}

// Calls function with a null pointer of the element type that dtype names.
template <typename Function>
auto dispatch(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(static_cast<double*>(nullptr));
    case DType::kBFloat16:
      return function(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return function(static_cast<Float16*>(nullptr));
    case DType::kFloat32:
      break;
  }
  return function(static_cast<float*>(nullptr));
}

double sum_squares_any(DType dtype, const void* x, int64_t n) {
  return dispatch(dtype, [=](auto* tag) {
    return sum_squares(static_cast<decltype(tag)>(const_cast<void*>(x)), n);
  });
}

double max_abs_any(DType dtype, const void* x, int64_t n) {
  return dispatch(dtype, [=](auto* tag) {
    return max_abs(static_cast<decltype(tag)>(const_cast<void*>(x)), n);
  });
}

AccumulateSums accumulate_any(const AccumulateChunk& chunk) {
  if (chunk.grad_dtype == DType::kFloat64) return accumulate<double>(chunk);
  return accumulate<float>(chunk);
}

void scale_any(DType dtype, void* x, int64_t n, double coefficient) {
  if (dtype == DType::kFloat64) return scale(static_cast<double*>(x), n, coefficient);
  const auto factor = static_cast<float>(coefficient);
  dispatch(dtype, [=](auto* tag) { scale(static_cast<decltype(tag)>(x), n, factor); });
}

void adam_any(const AdamChunk& chunk, const AdamScalars& scalars, double coefficient) {
  if (chunk.weights.dtype == DType::kFloat64) return adam<double>(chunk, scalars, coefficient);
  adam<float>(chunk, scalars, coefficient);
}

void sgd_any(const SgdChunk& chunk, const SgdScalars& scalars, double coefficient) {
  if (chunk.weights.dtype == DType::kFloat64) return sgd<double>(chunk, scalars, coefficient);
  sgd<float>(chunk, scalars, coefficient);
}

void move_average_any(const Weights& weights, int64_t num_elements) {
  if (weights.dtype == DType::kFloat64) return move_averages<double>(weights, num_elements);
  move_averages<float>(weights, num_elements);
}

#define STEPCLOCK_STRING_OF(name) #name
#define STEPCLOCK_STRING(name) STEPCLOCK_STRING_OF(name)
constexpr Kernels kKernels = {STEPCLOCK_STRING(STEPCLOCK_ISA),
                              sum_squares_any,
                              max_abs_any,
                              accumulate_any,
                              scale_any,
                              adam_any,
                              sgd_any,
                              move_average_any};

}  // namespace

const Kernels& kernels() { return kKernels; }

}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
