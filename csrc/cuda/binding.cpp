// The Python face of the CUDA kernels: module stepclock_ext._CUDA.
//
// Everything arrives as an address or a number; neither torch nor a tensor is known here. The
// caller (backends/cuda.py) has checked dtypes, layouts and devices, and keeps alive what the
// addresses point at.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "launch.h"

namespace py = pybind11;

namespace stepclock {
namespace cuda {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("stepclock_ext._CUDA: ") + what + ": " +
                           cudaGetErrorString(error));
}

// Makes a device current, and the one before again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != before_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

template <typename T>
T* as(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// What backends/device_table.py keeps, by address.
struct Table {
  TableView view;
  std::vector<Section> sections;
  int device;

  Target on(uintptr_t stream) const {
    return Target{view, sections.data(), static_cast<int>(sections.size()),
                  as<std::remove_pointer_t<cudaStream_t>>(stream)};
  }
};

// First chunk, number of chunks, and the codes of three dtypes.
using SectionTuple = std::tuple<int64_t, int64_t, int, int, int>;

Table make_table(uintptr_t chunks, uintptr_t num_elements, uintptr_t addresses, int64_t num_rows,
                 const std::vector<SectionTuple>& sections, int device) {
  Table table{TableView{as<const int64_t>(chunks), as<const int64_t>(num_elements),
                        as<const int64_t>(addresses), num_rows},
              {},
              device};
  for (const auto& [first, count, param, accumulator, state] : sections) {
    table.sections.push_back(Section{first, count, static_cast<DType>(param),
                                     static_cast<DType>(accumulator), static_cast<DType>(state)});
  }
  return table;
}

void bind_values(py::module_& module) {
  py::class_<Table>(module, "Table")
      .def(py::init(&make_table), py::kw_only(), py::arg("chunks"), py::arg("num_elements"),
           py::arg("addresses"), py::arg("num_rows"), py::arg("sections"), py::arg("device"));
  py::class_<AdamScalars>(module, "AdamScalars")
      .def(py::init<double, double, double, double, double, bool, bool>(), py::kw_only(),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("amsgrad"));
  py::class_<SgdScalars>(module, "SgdScalars")
      .def(py::init<double, double, double, double, bool, bool>(), py::kw_only(), py::arg("lr"),
           py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"),
           py::arg("first"));
  py::class_<Companions>(module, "Companions")
      .def(py::init<bool, bool, bool, bool, double, uint64_t>(), py::kw_only(),
           py::arg("has_masters"), py::arg("has_averages"), py::arg("stochastic"), py::arg("gated"),
           py::arg("average_weight"), py::arg("rounding_key"));
}

void bind_gradient_ops(py::module_& module) {
  module.def("sum_squares", [](uintptr_t slots, const Table& table, uintptr_t stream) {
    const DeviceGuard guard(table.device);
    check(sum_squares(as<double>(slots), table.on(stream)), "sum_squares");
  });
  module.def("max_abs", [](uintptr_t slots, const Table& table, uintptr_t stream) {
    const DeviceGuard guard(table.device);
    check(max_abs(as<double>(slots), table.on(stream)), "max_abs");
  });
  module.def("accumulate", [](const Table& table, bool store, uintptr_t slots, uintptr_t grad_slots,
                              uintptr_t prior_slots, uintptr_t stream) {
    const DeviceGuard guard(table.device);
    const AccumulateSlots into = {as<double>(slots), as<double>(grad_slots),
                                  as<double>(prior_slots)};
    check(accumulate(into, store, table.on(stream)), "accumulate");
  });
  module.def("scale", [](const Table& table, uintptr_t stats, uintptr_t stream) {
    const DeviceGuard guard(table.device);
    check(scale(as<double>(stats), table.on(stream)), "scale");
  });
  module.def("coefficient",
             [](uintptr_t stats, uintptr_t scratch, uintptr_t slots, int64_t num_slots,
                double divisor, double max_norm, bool maxima, int device, uintptr_t stream) {
               const DeviceGuard guard(device);
               check(coefficient(as<double>(stats), as<void>(scratch), as<double>(slots), num_slots,
                                 ClipRule{divisor, max_norm, maxima},
                                 as<std::remove_pointer_t<cudaStream_t>>(stream)),
                     "coefficient");
             });
}

void bind_update_ops(py::module_& module) {
  module.def("adam",
             [](const Table& table, uintptr_t biases, uintptr_t stats, const AdamScalars& scalars,
                const Companions& companions, bool maximize, uintptr_t stream) {
               const DeviceGuard guard(table.device);
               check(adam(as<double>(biases), as<double>(stats), scalars, companions, maximize,
                          table.on(stream)),
                     "adam");
             });
  module.def("sgd", [](const Table& table, uintptr_t stats, const SgdScalars& scalars,
                       const Companions& companions, bool maximize, uintptr_t stream) {
    const DeviceGuard guard(table.device);
    check(sgd(as<double>(stats), scalars, companions, maximize, table.on(stream)), "sgd");
  });
  module.def("move_average", [](const Table& table, uintptr_t stats, const Companions& companions,
                                uintptr_t stream) {
    const DeviceGuard guard(table.device);
    check(move_average(as<double>(stats), companions, table.on(stream)), "move_average");
  });
}

// Why no kernel can run here, or an empty string.
std::string find_fault() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count == 0 ? "no CUDA device" : "";
}

}  // namespace
}  // namespace cuda
}  // namespace stepclock

PYBIND11_MODULE(_CUDA, module) {
  using namespace stepclock::cuda;
  module.doc() = "CUDA kernels of stepclock_ext on raw pointers; use stepclock_ext.ops instead.";
  module.attr("CHUNK_ELEMENTS") = stepclock::kChunkElements;
  module.attr("ARCHS") = STEPCLOCK_CUDA_ARCHS;
  module.attr("TOOLKIT") = CUDART_VERSION;
  module.attr("SCRATCH_BYTES") = coefficient_scratch_bytes();
  bind_values(module);
  bind_gradient_ops(module);
  bind_update_ops(module);
  module.def("find_fault", &find_fault);
}
