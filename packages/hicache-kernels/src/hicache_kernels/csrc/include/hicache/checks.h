// Checks of tensors where a call enters a module: one error that names the tensor, its value and what is accepted.
#pragma once

#include <hicache/device.h>

#include <initializer_list>

namespace hicache {

// A dimension whose size is not known beforehand: the first tensor that uses it fixes the size for the others.
struct Symbol {
  const char* name;
  int64_t value = -1;
};

class TensorCheck {
 public:
  TensorCheck(const tvm::ffi::TensorView& tensor, const char* name) : tensor_(tensor), name_(name) {}

  TensorCheck& on_cpu() {
    const DLDeviceType type = tensor_.device().device_type;
    if (type != kDLCPU && type != kDLGPUHost) {
      TVM_FFI_THROW(ValueError) << name_ << " lies on device type " << static_cast<int>(type) << "; it must be in CPU memory";
    }
    return *this;
  }

  // Where the kernels of this build can read at the address that the tensor has: device memory, or CPU memory in a CPU
  // build. Pinned memory may have another address for kernels.
  TensorCheck& on_device() {
    const DLDeviceType type = tensor_.device().device_type;
    if (type != kDLGPU) {
      TVM_FFI_THROW(ValueError) << name_ << " lies on device type " << static_cast<int>(type) << "; it must be "
                                << static_cast<int>(kDLGPU);
    }
    return *this;
  }

  TensorCheck& integers(std::initializer_list<int> bits) {
    const DLDataType type = tensor_.dtype();
    bool fits = false;
    for (int accepted : bits) fits = fits || type.bits == accepted;
    if (type.code != kDLInt || type.lanes != 1 || !fits) {
      TVM_FFI_THROW(TypeError) << name_ << " has dtype code " << static_cast<int>(type.code) << " with "
                               << static_cast<int>(type.bits) << " bits; it must be a signed integer of "
                               << *bits.begin() << (bits.size() > 1 ? " or 64" : "") << " bits";
    }
    return *this;
  }

  TensorCheck& shape(std::initializer_list<Symbol*> dims) {
    if (tensor_.ndim() != static_cast<int>(dims.size())) {
      TVM_FFI_THROW(ValueError) << name_ << " has " << tensor_.ndim() << " dimensions; it must have " << dims.size();
    }
    if (!tensor_.IsContiguous()) TVM_FFI_THROW(ValueError) << name_ << " is not contiguous";
    int axis = 0;
    for (Symbol* dim : dims) {
      const int64_t size = tensor_.size(axis);
      if (dim->value < 0) dim->value = size;
      if (dim->value != size) {
        TVM_FFI_THROW(ValueError) << name_ << " has size " << size << " in dimension " << axis << "; it must be "
                                  << dim->name << " = " << dim->value;
      }
      ++axis;
    }
    return *this;
  }

 private:
  const tvm::ffi::TensorView& tensor_;
  const char* name_;
};

inline const int64_t* int64_data(const tvm::ffi::TensorView& tensor) {
  return static_cast<const int64_t*>(tensor.data_ptr()) + tensor.byte_offset() / 8;
}

}  // namespace hicache
