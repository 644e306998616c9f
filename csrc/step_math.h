// The arithmetic of one element of one update, written once for every backend in C++.
//
// Each function takes values in registers (already widened to the compute type C: float, or double
// for double) and writes them back through references; loads, stores and the walk over memory
// belong to the kernels. Formulas are those of torch.optim (Kingma & Ba 2015; Loshchilov & Hutter
// 2019; Sutskever et al. 2013 for momentum), in torch's order of operations.
#pragma once

#include <cmath>

#include "isa.h"

namespace stepclock {
namespace STEPCLOCK_ISA {

// Correctly rounded everywhere; the builtins spare the CPU a check of errno.
#if defined(__CUDA_ARCH__)
STEPCLOCK_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
STEPCLOCK_HOST_DEVICE double square_root(double x) { return sqrt(x); }
#else
STEPCLOCK_HOST_DEVICE float square_root(float x) { return __builtin_sqrtf(x); }
STEPCLOCK_HOST_DEVICE double square_root(double x) { return __builtin_sqrt(x); }
#endif

// What is equal for all elements of a parameter in one update.
template <typename C>
struct AdamStep {
  C coefficient;  // window sum -> gradient; negative when the objective is maximised
  C beta2;
  C grad_weight;    // 1 - beta1
  C square_weight;  // 1 - beta2
  C eps;
  C decay;           // L2: weight_decay; decoupled: 1 - lr * weight_decay
  C step_size;       // lr / (1 - beta1^t)
  C inv_sqrt_bias2;  // 1 / sqrt(1 - beta2^t)
};

// Decoupled decay is AdamW, otherwise the decay is added to the gradient (Adam with L2).
template <bool kDecoupled, bool kAmsgrad, typename C>
STEPCLOCK_HOST_DEVICE void adam_element(C& param, C sum, C& exp_avg, C& exp_avg_sq,
                                        C& max_exp_avg_sq, const AdamStep<C>& s) {
  C grad = sum * s.coefficient;
  if (kDecoupled) {
    param *= s.decay;
  } else {
    grad += s.decay * param;
  }
  exp_avg += s.grad_weight * (grad - exp_avg);
  exp_avg_sq = exp_avg_sq * s.beta2 + s.square_weight * grad * grad;
  C second = exp_avg_sq;
  if (kAmsgrad) {
    // A NaN on either side stays: it must not read as "smaller".
    const bool grows = exp_avg_sq > max_exp_avg_sq || exp_avg_sq != exp_avg_sq;
    max_exp_avg_sq = grows ? exp_avg_sq : max_exp_avg_sq;
    second = max_exp_avg_sq;
  }
  param -= s.step_size * exp_avg / (square_root(second) * s.inv_sqrt_bias2 + s.eps);
}

// Where the two are equal nothing moves: a mask of -inf stays one, since -inf - -inf is NaN.
template <typename C>
STEPCLOCK_HOST_DEVICE void average_element(C& average, C param, C weight) {
  average = param == average ? average : average + weight * (param - average);
}

template <typename C>
struct SgdStep {
  C coefficient;  // as in AdamStep
  C lr;
  C momentum;
  C grad_weight;  // 1 - dampening
  C weight_decay;
};

// The first update of a momentum buffer stores the gradient, without dampening. Without decay the
// parameter is left out of the gradient: 0 * inf would turn a mask of -inf into NaN.
template <bool kDecay, bool kMomentum, bool kFirst, bool kNesterov, typename C>
STEPCLOCK_HOST_DEVICE void sgd_element(C& param, C sum, C& buffer, const SgdStep<C>& s) {
  C grad = sum * s.coefficient;
  if (kDecay) grad += s.weight_decay * param;
  if (kMomentum) {
    buffer = kFirst ? grad : buffer * s.momentum + s.grad_weight * grad;
    grad = kNesterov ? grad + s.momentum * buffer : buffer;
  }
  param -= s.lr * grad;
}

}  // namespace STEPCLOCK_ISA
}  // namespace stepclock
