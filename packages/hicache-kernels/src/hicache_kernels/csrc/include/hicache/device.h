// The one place that knows which device runtime a module is built against: CUDA, ROCm, or none (the CPU build).
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>

#if defined(__HIP__) || defined(__HIPCC__)
#define HICACHE_ROCM 1
#define HICACHE_GPU 1
#include <hip/hip_runtime.h>
#elif defined(__CUDACC__)
#define HICACHE_CUDA 1
#define HICACHE_GPU 1
#include <cuda.h>
#include <cuda_runtime.h>
#endif

namespace hicache {

#if defined(HICACHE_CUDA)

constexpr DLDeviceType kDLGPU = kDLCUDA;
constexpr DLDeviceType kDLGPUHost = kDLCUDAHost;

using gpuStream_t = cudaStream_t;
using gpuEvent_t = cudaEvent_t;
using gpuError_t = cudaError_t;
constexpr gpuError_t gpuSuccess = cudaSuccess;
inline const char* gpuGetErrorString(gpuError_t error) { return cudaGetErrorString(error); }
inline gpuError_t gpuGetLastError() { return cudaGetLastError(); }
inline gpuError_t gpuEventRecord(gpuEvent_t event, gpuStream_t stream) { return cudaEventRecord(event, stream); }
inline gpuError_t gpuStreamWaitEvent(gpuStream_t stream, gpuEvent_t event) {
  return cudaStreamWaitEvent(stream, event, 0);
}
inline bool gpuIsCapturing(gpuStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  static_cast<void>(cudaGetLastError());
  return true;  // the default stream, while another one is captured
}
inline gpuError_t gpuStreamCreate(gpuStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
}
inline gpuError_t gpuMemsetAsync(void* to, int value, size_t bytes, gpuStream_t stream) {
  return cudaMemsetAsync(to, value, bytes, stream);
}
inline gpuError_t gpuMemcpyAsync(void* to, const void* from, size_t bytes, bool to_host, gpuStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream);
}
inline gpuError_t gpuMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                   size_t height, bool to_host, gpuStream_t stream) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height,
                           to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream);
}
inline gpuError_t gpuHostGetDevicePointer(void** found, void* host) { return cudaHostGetDevicePointer(found, host, 0); }
#define HICACHE_GRID_CONSTANT __grid_constant__

#if CUDART_VERSION >= 12050
typedef CUresult (*WaitValueCall)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

// A call of the driver, looked up at run time so that a module needs no libcuda to load. Null where it is missing.
inline WaitValueCall find_wait_call() {
  static const WaitValueCall call = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &found, 12000, cudaEnableDefault, &status);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<WaitValueCall>(found)
                                                                         : nullptr;
  }();
  return call;
}
inline bool gpuCanWaitForValues() { return find_wait_call() != nullptr; }
// Holds a stream until the word at a device address has reached a value.
inline gpuError_t gpuStreamWaitValue(gpuStream_t stream, const uint32_t* address, uint32_t value) {
  const CUresult result =
      find_wait_call()(stream, reinterpret_cast<CUdeviceptr>(address), value, CU_STREAM_WAIT_VALUE_GEQ);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
#else
inline bool gpuCanWaitForValues() { return false; }
inline gpuError_t gpuStreamWaitValue(gpuStream_t, const uint32_t*, uint32_t) { return cudaErrorNotSupported; }
#endif

#elif defined(HICACHE_ROCM)

constexpr DLDeviceType kDLGPU = kDLROCM;
constexpr DLDeviceType kDLGPUHost = kDLROCMHost;

using gpuStream_t = hipStream_t;
using gpuEvent_t = hipEvent_t;
using gpuError_t = hipError_t;
constexpr gpuError_t gpuSuccess = hipSuccess;
inline const char* gpuGetErrorString(gpuError_t error) { return hipGetErrorString(error); }
inline gpuError_t gpuGetLastError() { return hipGetLastError(); }
inline gpuError_t gpuEventRecord(gpuEvent_t event, gpuStream_t stream) { return hipEventRecord(event, stream); }
inline gpuError_t gpuStreamWaitEvent(gpuStream_t stream, gpuEvent_t event) {
  return hipStreamWaitEvent(stream, event, 0);
}
inline bool gpuIsCapturing(gpuStream_t stream) {
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  if (hipStreamIsCapturing(stream, &status) == hipSuccess) return status != hipStreamCaptureStatusNone;
  static_cast<void>(hipGetLastError());
  return true;  // the default stream, while another one is captured
}
inline gpuError_t gpuStreamCreate(gpuStream_t* stream) {
  return hipStreamCreateWithFlags(stream, hipStreamNonBlocking);
}
inline gpuError_t gpuMemsetAsync(void* to, int value, size_t bytes, gpuStream_t stream) {
  return hipMemsetAsync(to, value, bytes, stream);
}
inline gpuError_t gpuMemcpyAsync(void* to, const void* from, size_t bytes, bool to_host, gpuStream_t stream) {
  return hipMemcpyAsync(to, from, bytes, to_host ? hipMemcpyDeviceToHost : hipMemcpyHostToDevice, stream);
}
inline gpuError_t gpuMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                   size_t height, bool to_host, gpuStream_t stream) {
  return hipMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height,
                          to_host ? hipMemcpyDeviceToHost : hipMemcpyHostToDevice, stream);
}
inline gpuError_t gpuHostGetDevicePointer(void** found, void* host) { return hipHostGetDevicePointer(found, host, 0); }
#define HICACHE_GRID_CONSTANT

// HIP waits for values in signal memory only, which a kernel cannot count in.
inline bool gpuCanWaitForValues() { return false; }
inline gpuError_t gpuStreamWaitValue(gpuStream_t, const uint32_t*, uint32_t) { return hipErrorNotSupported; }

#else

constexpr DLDeviceType kDLGPU = kDLCPU;
constexpr DLDeviceType kDLGPUHost = kDLCPU;

#endif

#if defined(HICACHE_GPU)

#define HICACHE_LAUNCH(kernel, blocks, threads, stream, argument) kernel<<<blocks, threads, 0, stream>>>(argument)

inline void check_gpu(gpuError_t error, const char* what) {
  if (error != gpuSuccess) {
    static_cast<void>(gpuGetLastError());  // leaves no pending error for the caller's next call
    TVM_FFI_THROW(RuntimeError) << what << " failed: " << gpuGetErrorString(error);
  }
}

// A stream of the current device that no other code has; it lives as long as the process.
inline int64_t create_stream_entry() {
  gpuStream_t stream = nullptr;
  check_gpu(gpuStreamCreate(&stream), "making a stream");
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(stream));
}

// Where kernels of the current device find a byte of pinned host memory.
inline int64_t device_address_entry(int64_t host) {
  void* found = nullptr;
  check_gpu(gpuHostGetDevicePointer(&found, reinterpret_cast<void*>(host)), "finding the device address of host memory");
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(found));
}

#else

inline int64_t create_stream_entry() { return 0; }
inline int64_t device_address_entry(int64_t host) { return host; }

#endif

}  // namespace hicache
