// Streaming loads and stores of 4, 8 and 16 bytes: rows pass once, so they should not displace what the caches hold.
#pragma once

#include <hicache/device.h>

#if defined(HICACHE_GPU)

namespace hicache {

template <int Bytes>
struct Words;

#if defined(HICACHE_CUDA)

template <>
struct Words<4> {
  uint32_t x;
};
template <>
struct Words<8> {
  uint32_t x, y;
};
template <>
struct Words<16> {
  uint32_t x, y, z, w;
};

__device__ __forceinline__ void load_nc(Words<4>& v, uint64_t address) {
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(v.x) : "l"(address));
}
__device__ __forceinline__ void load_nc(Words<8>& v, uint64_t address) {
  asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
}
__device__ __forceinline__ void load_nc(Words<16>& v, uint64_t address) {
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
}
__device__ __forceinline__ void store_nc(uint64_t address, const Words<4>& v) {
  asm volatile("st.global.L1::no_allocate.b32 [%0], %1;" ::"l"(address), "r"(v.x) : "memory");
}
__device__ __forceinline__ void store_nc(uint64_t address, const Words<8>& v) {
  asm volatile("st.global.L1::no_allocate.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(v.x), "r"(v.y) : "memory");
}
__device__ __forceinline__ void store_nc(uint64_t address, const Words<16>& v) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

#elif defined(HICACHE_ROCM)

// One vector a load: split into 32-bit builtins, the compiler no longer joins them into one wide instruction. The address
// space makes them global_ rather than flat_ instructions.
template <int Bytes>
struct Native;
template <>
struct Native<4> {
  typedef uint32_t type;
};
template <>
struct Native<8> {
  typedef uint32_t type __attribute__((ext_vector_type(2)));
};
template <>
struct Native<16> {
  typedef uint32_t type __attribute__((ext_vector_type(4)));
};

template <int Bytes>
struct Words {
  typename Native<Bytes>::type value;
};

template <int Bytes>
__device__ __forceinline__ void load_nc(Words<Bytes>& v, uint64_t address) {
  typedef const __attribute__((address_space(1))) typename Native<Bytes>::type* Pointer;
  v.value = __builtin_nontemporal_load(reinterpret_cast<Pointer>(address));
}
template <int Bytes>
__device__ __forceinline__ void store_nc(uint64_t address, const Words<Bytes>& v) {
  typedef __attribute__((address_space(1))) typename Native<Bytes>::type* Pointer;
  __builtin_nontemporal_store(v.value, reinterpret_cast<Pointer>(address));
}

#endif

// Adds one for each 32 threads, once all their stores can be seen by every reader of the sum.
__device__ __forceinline__ void count_warp(uint32_t* sum) {
#if defined(HICACHE_CUDA)
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    atomicAdd(sum, 1u);
  }
#else
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(sum, blockDim.x / 32);
  }
#endif
}

}  // namespace hicache

#endif
