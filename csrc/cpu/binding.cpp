// The Python face of the CPU kernels: module stepclock_ext._C.
//
// Tensors arrive as Python objects; nothing of torch is linked. The caller (backends/native.py) has
// checked dtypes, layouts and sizes. Ops release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "launch.h"
#include "table.h"
#include "tensors.h"
#include "threads.h"

namespace py = pybind11;

namespace stepclock {
namespace {

std::vector<DType> dtypes_of(const std::vector<int>& codes) {
  std::vector<DType> dtypes;
  for (const int code : codes) dtypes.push_back(static_cast<DType>(code));
  return dtypes;
}

Table make_table(std::vector<int64_t> num_elements, const std::vector<int>& dtypes,
                 const std::vector<int64_t>& first_slots) {
  if (dtypes.size() != num_elements.size() || first_slots.size() != num_elements.size()) {
    throw py::value_error("Table: one dtype and one first slot a row");
  }
  return Table(std::move(num_elements), dtypes_of(dtypes), first_slots);
}

void set_dtypes(Table& table, const std::vector<int>& accumulators,
                const std::vector<int>& states) {
  if (static_cast<int64_t>(accumulators.size()) != table.num_rows() ||
      accumulators.size() != states.size()) {
    throw py::value_error("Table.set_dtypes: one dtype of accumulator and state a row");
  }
  table.set_accumulator_dtypes(dtypes_of(accumulators));
  table.set_state_dtypes(dtypes_of(states));
}

bool bind_column(Table& table, int column, const py::list& tensors) {
  if (column < 0 || column >= kNumColumns ||
      static_cast<int64_t>(tensors.size()) != table.num_rows()) {
    throw py::value_error("Table.bind: column " + std::to_string(column) + " with " +
                          std::to_string(tensors.size()) + " tensors for " +
                          std::to_string(table.num_rows()) + " rows");
  }
  return table.set_column(static_cast<Column>(column), read_addresses(tensors));
}

void require(const Table& table, std::initializer_list<Column> columns, const char* op) {
  for (const Column column : columns) {
    if (!table.has_column(column)) {
      throw std::runtime_error(std::string(op) + ": column " + std::to_string(column) +
                               " is not bound");
    }
  }
}

void require_companions(const Table& table, const Companions& companions, const char* op) {
  if (companions.has_masters) require(table, {kMaster}, op);
  if (companions.has_averages) require(table, {kAverage}, op);
}

// True if each dict holds, under key, the very object that items has at its place.
bool holds_same(const py::list& dicts, const py::str& key, const py::list& items) {
  if (dicts.size() != items.size()) return false;
  for (size_t i = 0; i < dicts.size(); ++i) {
    PyObject* const found = PyDict_GetItemWithError(
        PyList_GET_ITEM(dicts.ptr(), static_cast<Py_ssize_t>(i)), key.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (found != PyList_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i))) return false;
  }
  return true;
}

double* as_doubles(uintptr_t address) { return reinterpret_cast<double*>(address); }

void bind_tables(py::module_& module) {
  py::class_<Table>(module, "Table")
      .def(py::init(&make_table), py::arg("num_elements"), py::arg("dtypes"),
           py::arg("first_slots"))
      .def("bind", &bind_column, py::arg("column"), py::arg("tensors"))
      .def("set_dtypes", &set_dtypes, py::arg("accumulators"), py::arg("states"))
      .def("gather_params", &gather_params, py::arg("params"))
      .def("gather_gradients", &gather_gradients, py::arg("params"));
  py::enum_<Column>(module, "Column", py::arithmetic())
      .value("PARAM", kParam)
      .value("GRAD", kGrad)
      .value("ACCUMULATOR", kAccumulator)
      .value("EXP_AVG", kExpAvg)
      .value("EXP_AVG_SQ", kExpAvgSq)
      .value("MAX_EXP_AVG_SQ", kMaxExpAvgSq)
      .value("BUFFER", kBuffer)
      .value("STEP", kStep)
      .value("MASTER", kMaster)
      .value("AVERAGE", kAverage);
  module.def("holds_same", &holds_same, py::arg("dicts"), py::arg("key"), py::arg("items"));
}

void bind_gradient_ops(py::module_& module) {
  module.def("sum_squares",
             [](uintptr_t slots, const Table& table, Column column, int num_threads) {
               require(table, {column}, "sum_squares");
               const py::gil_scoped_release release;
               sum_squares(as_doubles(slots), table, column, num_threads);
             });
  module.def("max_abs", [](uintptr_t slots, const Table& table, Column column, int num_threads) {
    require(table, {column}, "max_abs");
    const py::gil_scoped_release release;
    max_abs(as_doubles(slots), table, column, num_threads);
  });
  module.def("accumulate", [](const Table& table, bool store, uintptr_t slots, uintptr_t grad_slots,
                              uintptr_t prior_slots, int num_threads) {
    require(table, {kAccumulator, kGrad}, "accumulate");
    const py::gil_scoped_release release;
    const AccumulateSlots into = {as_doubles(slots), as_doubles(grad_slots),
                                  as_doubles(prior_slots)};
    accumulate(table, store, into, num_threads);
  });
  module.def("scale", [](const Table& table, Column column, uintptr_t factor, int num_threads) {
    require(table, {column}, "scale");
    const py::gil_scoped_release release;
    scale(table, column, as_doubles(factor), num_threads);
  });
  module.def("coefficient", [](uintptr_t stats, uintptr_t slots, int64_t num_slots, double divisor,
                               double max_norm, bool slots_are_maxima) {
    coefficient(as_doubles(stats), as_doubles(slots), num_slots,
                ClipRule{divisor, max_norm, slots_are_maxima});
  });
}

void bind_update_ops(py::module_& module) {
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
  module.def("adam",
             [](const Table& table, const AdamScalars& scalars, const Companions& companions,
                uintptr_t stats, bool maximize, int num_threads) {
               require(table, {kParam, kAccumulator, kExpAvg, kExpAvgSq, kStep}, "adam");
               if (scalars.amsgrad) require(table, {kMaxExpAvgSq}, "adam");
               require_companions(table, companions, "adam");
               const py::gil_scoped_release release;
               adam(table, scalars, companions, as_doubles(stats), maximize, num_threads);
             });
  module.def("sgd", [](const Table& table, const SgdScalars& scalars, const Companions& companions,
                       uintptr_t stats, bool maximize, int num_threads) {
    require(table, {kParam, kAccumulator}, "sgd");
    if (scalars.momentum != 0.0) require(table, {kBuffer}, "sgd");
    require_companions(table, companions, "sgd");
    const py::gil_scoped_release release;
    sgd(table, scalars, companions, as_doubles(stats), maximize, num_threads);
  });
  module.def("move_average", [](const Table& table, const Companions& companions, uintptr_t stats,
                                int num_threads) {
    require(table, {kParam, kAverage}, "move_average");
    require_companions(table, companions, "move_average");
    const py::gil_scoped_release release;
    move_average(table, companions, as_doubles(stats), num_threads);
  });
}

std::vector<std::string> list_isas() {
  std::vector<std::string> names;
  for (const char* const* name = available_isas(); *name != nullptr; ++name) names.push_back(*name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "CPU kernels of stepclock_ext on raw pointers; use stepclock_ext.ops instead.";
  module.attr("CHUNK_ELEMENTS") = kChunkElements;
#ifdef __clang__
  module.attr("COMPILER") = __VERSION__;  // names itself
#else
  module.attr("COMPILER") = "g++ " __VERSION__;
#endif
  bind_tables(module);
  bind_gradient_ops(module);
  bind_update_ops(module);
  module.def("use_exchange_api", &use_exchange_api);
  module.def("isa", [] { return std::string(active_kernels().name); });
  module.def("available_isas", &list_isas);
  module.def("use_isa", [](const std::string& name) {
    if (const char* reason = use_isa(name.c_str())) {
      throw py::value_error("use_isa: cannot use " + name + ": " + reason);
    }
  });
  module.def("thread_pool", [] { return std::string(thread_pool_name()); });
}

}  // namespace stepclock
