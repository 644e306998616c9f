// Addresses, sizes and dtypes of torch tensors.
//
// A visit to a tensor costs some 60 ns whatever is asked, so all that is needed is read at one
// visit.
#include "tensors.h"

#include <utility>

#include "dlpack_abi.h"

namespace py = pybind11;

namespace stepclock {
namespace {

const dlpack::ExchangeApi* exchange_api = nullptr;

dlpack::DataType dlpack_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return {dlpack::kFloat, 64, 1};
    case DType::kBFloat16:
      return {dlpack::kBFloat, 16, 1};
    case DType::kFloat16:
      return {dlpack::kFloat, 16, 1};
    case DType::kFloat32:
      break;
  }
  return {dlpack::kFloat, 32, 1};
}

bool is_plain(const dlpack::Tensor& tensor, DType dtype, int64_t num_elements) {
  const dlpack::DataType want = dlpack_type(dtype);
  if (tensor.device_type != dlpack::kCpu || tensor.dtype.code != want.code ||
      tensor.dtype.bits != want.bits) {
    return false;
  }
  int64_t size = 1;
  bool contiguous = true;
  for (int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
    contiguous &= tensor.shape[dim] == 1 || tensor.strides[dim] == size;
    size *= tensor.shape[dim];
  }
  return size == num_elements && (contiguous || size == 0);
}

uintptr_t address_of(const dlpack::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

// False where the tensor does not lie as its row says; a sparse one, say, cannot be read at all.
bool read_plain(PyObject* tensor, const Table& table, size_t row, uintptr_t* address) {
  dlpack::Tensor view;
  if (exchange_api->tensor_from_py_object(tensor, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  const auto index = static_cast<int64_t>(row);
  *address = address_of(view);
  return is_plain(view, table.dtype(kParam, index), table.num_elements(index));
}

uintptr_t call_data_ptr(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("data_ptr");
  const py::object address =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, name));
  if (!address) throw py::error_already_set();
  void* const pointer = PyLong_AsVoidPtr(address.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return reinterpret_cast<uintptr_t>(pointer);
}

}  // namespace

void use_exchange_api(const py::capsule& capsule) {
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->major != dlpack::kMajorVersion) api = api->previous;
  if (api != nullptr && api->tensor_from_py_object != nullptr) exchange_api = api;
}

std::vector<uintptr_t> read_addresses(const py::list& tensors) {
  std::vector<uintptr_t> addresses;
  addresses.reserve(tensors.size());
  for (const py::handle tensor : tensors) {
    if (exchange_api == nullptr) {
      addresses.push_back(call_data_ptr(tensor.ptr()));
      continue;
    }
    dlpack::Tensor view;
    if (exchange_api->tensor_from_py_object(tensor.ptr(), &view) != 0) {
      throw py::error_already_set();
    }
    addresses.push_back(address_of(view));
  }
  return addresses;
}

bool gather_params(Table& table, const py::list& params) {
  if (exchange_api == nullptr || static_cast<int64_t>(params.size()) != table.num_rows()) {
    return false;
  }
  std::vector<uintptr_t> addresses(params.size());
  for (size_t row = 0; row < params.size(); ++row) {
    PyObject* const param = PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(row));
    if (!read_plain(param, table, row, &addresses[row])) return false;
  }
  table.set_column(kParam, std::move(addresses));
  return true;
}

py::object gather_gradients(Table& table, const py::list& params) {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  if (exchange_api == nullptr || static_cast<int64_t>(params.size()) != table.num_rows()) {
    return py::none();
  }
  py::list grads(params.size());
  std::vector<uintptr_t> param_addresses(params.size());
  std::vector<uintptr_t> grad_addresses(params.size());
  for (size_t row = 0; row < params.size(); ++row) {
    PyObject* const param = PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(row));
    py::object grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, name));
    if (!grad) throw py::error_already_set();
    if (grad.is_none() || !read_plain(param, table, row, &param_addresses[row]) ||
        !read_plain(grad.ptr(), table, row, &grad_addresses[row])) {
      return py::none();
    }
    PyList_SET_ITEM(grads.ptr(), static_cast<Py_ssize_t>(row), grad.release().ptr());
  }
  table.set_column(kParam, std::move(param_addresses));
  table.set_column(kAccumulator, std::move(grad_addresses));
  return std::move(grads);
}

}  // namespace stepclock
