// Reads torch tensors from Python objects, without a torch header.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "table.h"

namespace stepclock {

// Uses torch's DLPack exchange from now on; without it, addresses come from data_ptr(). `capsule`
// is torch.Tensor.__dlpack_c_exchange_api__.
void use_exchange_api(const pybind11::capsule& capsule);

// The address of each tensor's first element.
std::vector<uintptr_t> read_addresses(const pybind11::list& tensors);

// Points kParam at the parameters, if every one of them lies as its row says. Always false without
// the exchange API.
bool gather_params(Table& table, const pybind11::list& params);

// Each parameter's .grad in one pass over the objects, and their addresses into kAccumulator, if
// every one is there, real, contiguous, on the CPU, and of its row's size and dtype. None
// otherwise, and always without the exchange API: the caller then looks at each one itself.
pybind11::object gather_gradients(Table& table, const pybind11::list& params);

}  // namespace stepclock
