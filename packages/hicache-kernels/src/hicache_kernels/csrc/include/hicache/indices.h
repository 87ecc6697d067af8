// Reads an operation's indices on the CPU in one pass: range, whole pages, runs, and the copy that is uploaded.
#pragma once

#include <hicache/checks.h>

#include <cstdint>

namespace hicache {

inline int64_t index_at(const tvm::ffi::TensorView& tensor, int64_t i) {
  const char* data = static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
  return tensor.dtype().bits == 64 ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
}

// host_indices, device_indices: int32 or int64 [slots] in CPU memory; device_indices may be empty: not looked at.
// pages: int64 [slots / page_size], receives the host pages. packed: int64 [2 or 0, slots], receives host and device slots.
// Returns the runs of neighbouring host pages, or -1 where an index is out of range or a page is not whole; the caller
// then looks for the fault and says which.
inline int64_t scan_indices_entry(tvm::ffi::TensorView host_indices, tvm::ffi::TensorView device_indices,
                                  tvm::ffi::TensorView pages, tvm::ffi::TensorView packed, int64_t page_size,
                                  int64_t host_slots, int64_t device_slots) {
  Symbol slots{"slots"}, device_count{"device indices"}, page_count{"pages"}, packed_rows{"packed rows"}, width{"width"};
  TensorCheck(host_indices, "host_indices").on_cpu().integers({32, 64}).shape({&slots});
  TensorCheck(device_indices, "device_indices").on_cpu().integers({32, 64}).shape({&device_count});
  TensorCheck(pages, "pages").on_cpu().integers({64}).shape({&page_count});
  TensorCheck(packed, "packed").on_cpu().integers({64}).shape({&packed_rows, &width});
  if (page_size < 1 || page_count.value * page_size != slots.value) return -1;
  if (device_count.value != 0 && device_count.value != slots.value) return -1;
  if (packed_rows.value != 0 && (packed_rows.value != 2 || width.value != slots.value)) return -1;
  int64_t* page_out = static_cast<int64_t*>(pages.data_ptr());
  int64_t* packed_out = packed_rows.value == 0 ? nullptr : static_cast<int64_t*>(packed.data_ptr());
  int64_t runs = 0, before = -2;
  for (int64_t p = 0; p < page_count.value; ++p) {
    const int64_t first = index_at(host_indices, p * page_size);
    if (first < 0 || first % page_size != 0 || first > host_slots - page_size) return -1;  // a sum might overflow
    for (int64_t s = 1; s < page_size; ++s) {
      if (index_at(host_indices, p * page_size + s) != first + s) return -1;
    }
    const int64_t page = first / page_size;
    runs += page != before + 1;
    before = page;
    page_out[p] = page;
    if (packed_out != nullptr) {
      for (int64_t s = 0; s < page_size; ++s) packed_out[p * page_size + s] = first + s;
    }
  }
  for (int64_t i = 0; i < device_count.value; ++i) {
    const int64_t slot = index_at(device_indices, i);
    if (slot < 0 || slot >= device_slots) return -1;
    if (packed_out != nullptr) packed_out[slots.value + i] = slot;
  }
  return runs;
}

}  // namespace hicache
