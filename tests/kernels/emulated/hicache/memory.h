// Loads and stores of the emulation test; a misaligned one is an error, as it would be on a device.
#pragma once

#include <hicache/device.h>

#include <cstdint>
#include <cstring>

namespace hicache {

template <int Bytes>
struct Words {
  char bytes[Bytes];
};

inline void check_alignment(uint64_t address, int bytes) {
  if (address % bytes != 0) TVM_FFI_THROW(RuntimeError) << "misaligned access of " << bytes << " bytes";
}
template <int Bytes>
void load_nc(Words<Bytes>& words, uint64_t address) {
  check_alignment(address, Bytes);
  std::memcpy(&words, reinterpret_cast<const void*>(address), Bytes);
}
template <int Bytes>
void store_nc(uint64_t address, const Words<Bytes>& words) {
  check_alignment(address, Bytes);
  std::memcpy(reinterpret_cast<void*>(address), &words, Bytes);
}

inline void count_warp(uint32_t* sum) { *sum += threadIdx.x % 32 == 0; }

}  // namespace hicache
