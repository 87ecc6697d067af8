// Stands in for the device runtime in the emulation test: threads run one after the other, copies and events at once.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstring>

#define HICACHE_GPU 1
#define HICACHE_GRID_CONSTANT
#define HICACHE_MAX_VECTORS 4096
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define HICACHE_LAUNCH(kernel, blocks, threads, stream, argument) emulate(kernel, blocks, threads, argument)

namespace hicache {

constexpr DLDeviceType kDLGPU = kDLCPU;
constexpr DLDeviceType kDLGPUHost = kDLCPU;

using gpuStream_t = void*;
using gpuEvent_t = void*;
using gpuError_t = int;
inline gpuError_t gpuGetLastError() { return 0; }
inline gpuError_t gpuEventRecord(gpuEvent_t, gpuStream_t) { return 0; }
inline gpuError_t gpuStreamWaitEvent(gpuStream_t, gpuEvent_t) { return 0; }
inline bool gpuIsCapturing(gpuStream_t) { return false; }
inline bool gpuCanWaitForValues() { return true; }
// Nothing arrives later: a count that is not there yet is an error.
inline gpuError_t gpuStreamWaitValue(gpuStream_t, const uint32_t* address, uint32_t value) { return *address != value; }
inline gpuError_t gpuMemsetAsync(void* to, int value, size_t bytes, gpuStream_t) {
  std::memset(to, value, bytes);
  return 0;
}
inline gpuError_t gpuMemcpyAsync(void* to, const void* from, size_t bytes, bool, gpuStream_t) {
  std::memcpy(to, from, bytes);
  return 0;
}
inline gpuError_t gpuMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                   size_t height, bool, gpuStream_t) {
  if (to_pitch < width || from_pitch < width) return 1;
  for (size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  }
  return 0;
}
inline void check_gpu(gpuError_t error, const char* what) {
  if (error != 0) TVM_FFI_THROW(RuntimeError) << what << " failed";
}

inline int64_t create_stream_entry() { return 0; }
inline int64_t device_address_entry(int64_t host) { return host; }

struct Index {
  unsigned x;
};
inline thread_local Index gridDim, blockDim, blockIdx, threadIdx;

template <typename Kernel, typename Argument>
void emulate(Kernel kernel, int blocks, int threads, const Argument& argument) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (int block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < threads; ++thread) {
      blockIdx.x = block;
      threadIdx.x = thread;
      kernel(argument);
    }
  }
}

}  // namespace hicache
