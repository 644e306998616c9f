// The part of the DLPack 1.x ABI (dmlc/dlpack, dlpack.h) that describes a tensor in place.
//
// torch >= 2.10 offers it as torch.Tensor.__dlpack_c_exchange_api__: one C call gives address,
// dtype, shape and strides, without a Python call for each.
#pragma once

#include <cstdint>

namespace stepclock {
namespace dlpack {

constexpr uint32_t kMajorVersion = 1;
constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2;
constexpr uint8_t kBFloat = 4;

struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  // 0 on success, -1 with a Python exception set. Null where a producer does not have it.
  int (*tensor_from_py_object)(void* object, Tensor* out);
  void* current_work_stream;
};

}  // namespace dlpack
}  // namespace stepclock
