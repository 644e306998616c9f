// Kernels of one chunk. Compiled once for each instruction set (see isa.h).
//
// Bytes moved, fp32: sum_squares 4 an element, accumulate 12 (8 when it stores), scale 8, adam 28,
// sgd 12 or 20. Bits: no contraction to fused multiply-add and a fixed number of partial sums, so
// that every instruction set gives the same result.
#include "kernels.h"

#include "half.h"
#include "isa.h"
#include "reductions.h"
#include "step_math.h"

namespace stepclock {
namespace STEPCLOCK_ISA {
namespace {

// The type that arithmetic on T runs in.
template <typename T>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};

template <typename T>
void add_or_store(T* __restrict accumulator, const T* __restrict grad, int64_t n, bool store_only) {
  if (store_only) {
    for (int64_t i = 0; i < n; ++i) accumulator[i] = grad[i];
  } else {
    for (int64_t i = 0; i < n; ++i) store(accumulator, i, load(accumulator, i) + load(grad, i));
  }
}

// A block of the accumulator and its squares: fp32 and fp64 in one visit, 16-bit types in two.
inline void accumulate_block(Lanes& lanes, float* accumulator, const float* grad, int64_t n) {
  lanes.accumulate(accumulator, grad, n);
}
inline void accumulate_block(Lanes& lanes, double* accumulator, const double* grad, int64_t n) {
  lanes.accumulate(accumulator, grad, n);
}
template <typename T>
inline void accumulate_block(Lanes& lanes, T* accumulator, const T* grad, int64_t n) {
  add_or_store(accumulator, grad, n, false);
  add_block(lanes, accumulator, n);
}

template <typename T>
double accumulate(T* accumulator, const T* grad, int64_t n, bool store_only, bool want_sum) {
  Lanes lanes;
  for (int64_t begin = 0; begin < n; begin += kBlockElements) {
    const int64_t size = smaller(kBlockElements, n - begin);
    if (want_sum && !store_only) {
      accumulate_block(lanes, accumulator + begin, grad + begin, size);
      continue;
    }
    add_or_store(accumulator + begin, grad + begin, size, store_only);
    if (want_sum) add_block(lanes, accumulator + begin, size);
  }
  return lanes.total();
}

template <typename T>
void scale(T* x, int64_t n, double coefficient) {
  const auto factor = static_cast<typename ComputeOf<T>::Type>(coefficient);
  for (int64_t i = 0; i < n; ++i) store(x, i, load(x, i) * factor);
}

template <bool kDecoupled, bool kAmsgrad, typename T, typename State, typename C>
void adam_loop(const AdamChunk& chunk, const AdamStep<C>& step) {
  T* __restrict param = static_cast<T*>(chunk.param);
  const T* __restrict grad = static_cast<const T*>(chunk.grad);
  State* __restrict exp_avg = static_cast<State*>(chunk.exp_avg);
  State* __restrict exp_avg_sq = static_cast<State*>(chunk.exp_avg_sq);
  State* __restrict max_exp_avg_sq = static_cast<State*>(chunk.max_exp_avg_sq);
  const AdamStep<C> s = step;
  for (int64_t i = 0; i < chunk.num_elements; ++i) {
    C p = load(param, i);
    C m = load(exp_avg, i);
    C v = load(exp_avg_sq, i);
    C largest = kAmsgrad ? load(max_exp_avg_sq, i) : C{0};
    adam_element<kDecoupled, kAmsgrad>(p, C{load(grad, i)}, m, v, largest, s);
    store(param, i, p);
    store(exp_avg, i, m);
    store(exp_avg_sq, i, v);
    if (kAmsgrad) store(max_exp_avg_sq, i, largest);
  }
}

template <typename T, typename State>
void adam(const AdamChunk& chunk, const AdamScalars& scalars, double coefficient) {
  using C = typename ComputeOf<T>::Type;
  // Adam without decay takes the decoupled path with a factor of one, which changes nothing.
  const bool decoupled = scalars.decoupled || scalars.weight_decay == 0.0;
  const AdamStep<C> step = {
      C(coefficient),
      C(scalars.beta2),
      C(1.0 - scalars.beta1),
      C(1.0 - scalars.beta2),
      C(scalars.eps),
      C(decoupled ? 1.0 - scalars.lr * scalars.weight_decay : scalars.weight_decay),
      C(scalars.lr / chunk.bias1),
      C(1.0 / __builtin_sqrt(chunk.bias2)),
  };
  if (scalars.amsgrad) {
    return decoupled ? adam_loop<true, true, T, State>(chunk, step)
                     : adam_loop<false, true, T, State>(chunk, step);
  }
  return decoupled ? adam_loop<true, false, T, State>(chunk, step)
                   : adam_loop<false, false, T, State>(chunk, step);
}

template <bool kDecay, bool kMomentum, bool kFirst, bool kNesterov, typename T, typename State,
          typename C>
void sgd_loop(const SgdChunk& chunk, const SgdStep<C>& step) {
  T* __restrict param = static_cast<T*>(chunk.param);
  const T* __restrict grad = static_cast<const T*>(chunk.grad);
  State* __restrict buffer = static_cast<State*>(chunk.buffer);
  const SgdStep<C> s = step;
  for (int64_t i = 0; i < chunk.num_elements; ++i) {
    C p = load(param, i);
    C b = kMomentum && !kFirst ? load(buffer, i) : C{0};
    sgd_element<kDecay, kMomentum, kFirst, kNesterov>(p, C{load(grad, i)}, b, s);
    store(param, i, p);
    if (kMomentum) store(buffer, i, b);
  }
}

template <bool kDecay, typename T, typename State, typename C>
void sgd_variant(const SgdChunk& chunk, const SgdScalars& scalars, const SgdStep<C>& step) {
  if (chunk.buffer == nullptr) return sgd_loop<kDecay, false, false, false, T, State>(chunk, step);
  if (scalars.first) {
    return scalars.nesterov ? sgd_loop<kDecay, true, true, true, T, State>(chunk, step)
                            : sgd_loop<kDecay, true, true, false, T, State>(chunk, step);
  }
  return scalars.nesterov ? sgd_loop<kDecay, true, false, true, T, State>(chunk, step)
                          : sgd_loop<kDecay, true, false, false, T, State>(chunk, step);
}

template <typename T, typename State>
void sgd(const SgdChunk& chunk, const SgdScalars& scalars, double coefficient) {
  using C = typename ComputeOf<T>::Type;
  const SgdStep<C> step = {C(coefficient), C(scalars.lr), C(scalars.momentum),
                           C(1.0 - scalars.dampening), C(scalars.weight_decay)};
  return scalars.weight_decay == 0.0 ? sgd_variant<false, T, State>(chunk, scalars, step)
                                     : sgd_variant<true, T, State>(chunk, scalars, step);
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

double accumulate_any(DType dtype, void* accumulator, const void* grad, int64_t n, bool store_only,
                      bool want_sum) {
  return dispatch(dtype, [=](auto* tag) {
    using Pointer = decltype(tag);
    return accumulate(static_cast<Pointer>(accumulator),
                      static_cast<Pointer>(const_cast<void*>(grad)), n, store_only, want_sum);
  });
}

void scale_any(DType dtype, void* x, int64_t n, double coefficient) {
  dispatch(dtype, [=](auto* tag) { scale(static_cast<decltype(tag)>(x), n, coefficient); });
}

template <typename T>
void adam_tagged(T*, DType state, const AdamChunk& chunk, const AdamScalars& scalars,
                 double coefficient) {
  if (sizeof(T) == 2 && state == DType::kFloat32)
    return adam<T, float>(chunk, scalars, coefficient);
  adam<T, T>(chunk, scalars, coefficient);
}

void adam_any(DType dtype, DType state, const AdamChunk& chunk, const AdamScalars& scalars,
              double coefficient) {
  dispatch(dtype, [&](auto* tag) { adam_tagged(tag, state, chunk, scalars, coefficient); });
}

template <typename T>
void sgd_tagged(T*, DType state, const SgdChunk& chunk, const SgdScalars& scalars,
                double coefficient) {
  if (sizeof(T) == 2 && state == DType::kFloat32) return sgd<T, float>(chunk, scalars, coefficient);
  sgd<T, T>(chunk, scalars, coefficient);
}

void sgd_any(DType dtype, DType state, const SgdChunk& chunk, const SgdScalars& scalars,
             double coefficient) {
  dispatch(dtype, [&](auto* tag) { sgd_tagged(tag, state, chunk, scalars, coefficient); });
}

#define STEPCLOCK_STRING_OF(name) #name
#define STEPCLOCK_STRING(name) STEPCLOCK_STRING_OF(name)
constexpr Kernels kKernels = {STEPCLOCK_STRING(STEPCLOCK_ISA),
                              sum_squares_any,
                              max_abs_any,
                              accumulate_any,
                              scale_any,
                              adam_any,
                              sgd_any};

}  // namespace

const Kernels& kernels() { return kKernels; }

}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
