// Many plain copies in one call where the runtime has such a call, one by one elsewhere.
#pragma once

#include <hicache/device.h>

#include <vector>

namespace hicache {

class CopyBatch {
 public:
  void clear() {
    to_.clear();
    from_.clear();
    bytes_.clear();
  }

  void add(void* to, void* from, size_t bytes) {
    to_.push_back(to);
    from_.push_back(from);
    bytes_.push_back(bytes);
  }

  void submit(bool to_host, gpuStream_t stream) {
    if (bytes_.size() >= kSmallestBatch && submit_batch(to_host, stream)) return;
    for (size_t i = 0; i < bytes_.size(); ++i) {
      check_gpu(gpuMemcpyAsync(to_[i], from_[i], bytes_[i], to_host, stream), "queueing a copy");
    }
  }

 private:
  static constexpr size_t kSmallestBatch = 4;

#if defined(HICACHE_CUDA) && CUDART_VERSION >= 12080
  // Looked up at run time: an older driver has no such call. The 12.8 form is asked for, which later drivers keep.
  typedef CUresult (*BatchCall)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*,
                                CUstream);

  static BatchCall find_call() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &found, 12080, cudaEnableDefault, &status);
    if (error != cudaSuccess || status != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return reinterpret_cast<BatchCall>(found);
  }

  bool submit_batch(bool to_host, gpuStream_t stream) {
    static const BatchCall call = find_call();
    if (call == nullptr) return false;
    CUmemcpyAttributes attributes{};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes.srcLocHint.type = to_host ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST;
    attributes.dstLocHint.type = to_host ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
    size_t first = 0, failed = 0;
    const CUresult result =
        call(reinterpret_cast<CUdeviceptr*>(to_.data()), reinterpret_cast<CUdeviceptr*>(from_.data()), bytes_.data(),
             bytes_.size(), &attributes, &first, 1, &failed, reinterpret_cast<CUstream>(stream));
    if (result != CUDA_SUCCESS) {
      TVM_FFI_THROW(RuntimeError) << "queueing a batch of " << bytes_.size() << " copies failed with driver error "
                                  << static_cast<int>(result);
    }
    return true;
  }
#else
  bool submit_batch(bool, gpuStream_t) { return false; }
#endif

  std::vector<void*> to_;
  std::vector<void*> from_;
  std::vector<size_t> bytes_;
};

}  // namespace hicache
