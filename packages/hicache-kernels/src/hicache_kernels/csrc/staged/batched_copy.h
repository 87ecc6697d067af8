// Queues the copies of a chunk: plain ones in one call where the runtime has such a call, one by one elsewhere. Pitched
// copies go one by one: batches of them (cuMemcpy3DBatchAsync) and a second stream were measured to be no faster.
#pragma once

#include <hicache/device.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "copies.h"

namespace hicache {

#if defined(HICACHE_CUDA) && CUDART_VERSION >= 12080

typedef CUresult (*BatchCall)(CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*,
                              CUstream);

// Looked up at run time since an older driver lacks it: the 12.8 form, which later drivers keep. Null where it is missing,
// or not wanted: tools that watch memory do not see it written by batches (compute-sanitizer initcheck of CUDA 13.0).
inline BatchCall find_batch_call() {
  static const BatchCall call = [] {
    const char* wanted = std::getenv("HICACHE_KERNELS_BATCHED_COPIES");
    if (wanted != nullptr && std::strcmp(wanted, "0") == 0) return BatchCall{nullptr};
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &found, 12080, cudaEnableDefault, &status);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchCall>(found) : nullptr;
  }();
  return call;
}

inline bool batches_copies() { return find_batch_call() != nullptr; }

inline void submit_batch(const std::vector<Copy>& copies, bool to_host, gpuStream_t stream) {
  std::vector<CUdeviceptr> to, from;
  std::vector<size_t> bytes;
  for (const Copy& copy : copies) {
    to.push_back(to_host ? copy.host : copy.staging);
    from.push_back(to_host ? copy.staging : copy.host);
    bytes.push_back(copy.width);
  }
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.srcLocHint.type = to_host ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST;
  attributes.dstLocHint.type = to_host ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  size_t first = 0, failed = 0;
  const CUresult result =
      find_batch_call()(to.data(), from.data(), bytes.data(), bytes.size(), &attributes, &first, 1, &failed, stream);
  if (result != CUDA_SUCCESS) {
    TVM_FFI_THROW(RuntimeError) << "queueing a batch of " << bytes.size() << " copies failed with driver error "
                                << static_cast<int>(result);
  }
}

#else

inline bool batches_copies() { return false; }
inline void submit_batch(const std::vector<Copy>&, bool, gpuStream_t) {}

#endif

constexpr size_t kSmallestBatch = 4;

inline void submit_flat(const std::vector<Copy>& copies, bool to_host, gpuStream_t stream) {
  if (copies.size() >= kSmallestBatch && batches_copies()) return submit_batch(copies, to_host, stream);
  for (const Copy& copy : copies) {
    void* host = reinterpret_cast<void*>(copy.host);
    void* staging = reinterpret_cast<void*>(copy.staging);
    check_gpu(gpuMemcpyAsync(to_host ? host : staging, to_host ? staging : host, copy.width, to_host, stream),
              "queueing a copy");
  }
}

inline void submit_pitched(const Copy& copy, bool to_host, gpuStream_t stream) {
  void* host = reinterpret_cast<void*>(copy.host);
  void* staging = reinterpret_cast<void*>(copy.staging);
  check_gpu(gpuMemcpy2DAsync(to_host ? host : staging, to_host ? copy.host_pitch : copy.staging_pitch,
                             to_host ? staging : host, to_host ? copy.staging_pitch : copy.host_pitch, copy.width,
                             copy.height, to_host, stream),
            "queueing a 2-D copy");
}

}  // namespace hicache
