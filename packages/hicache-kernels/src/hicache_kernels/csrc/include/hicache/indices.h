// Reads an operation's indices on the CPU in one pass: range, whole pages, runs, and the copy that is uploaded.
#pragma once

#include <hicache/checks.h>

#include <algorithm>
#include <cstdint>

namespace hicache {

inline int64_t index_at(const tvm::ffi::TensorView& tensor, int64_t i) {
  const char* data = static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
  return tensor.dtype().bits == 64 ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
}

// One pass over host slots: whole pages in range, their numbers, the runs they form. -1 where one is not.
template <typename Index>
int64_t scan_host(const Index* slots, int64_t page_count, int64_t page_size, int64_t host_slots, int64_t* pages,
                  int64_t* packed) {
  int64_t runs = 0;
  uint64_t expected = ~uint64_t{0};  // the page that would continue the run
  if (page_size == 1) {
    uint64_t outside = 0;
    for (int64_t p = 0; p < page_count; ++p) {
      const int64_t page = slots[p];
      outside |= static_cast<uint64_t>(page) >= static_cast<uint64_t>(host_slots);
      runs += static_cast<uint64_t>(page) != expected;
      expected = static_cast<uint64_t>(page) + 1;
      pages[p] = page;
    }
    if (outside != 0) return -1;
    if (packed != nullptr) std::copy(pages, pages + page_count, packed);
    return runs;
  }
  for (int64_t p = 0; p < page_count; ++p, slots += page_size) {
    const int64_t first = slots[0];
    if (first < 0 || first > host_slots - page_size) return -1;
    const int64_t page = static_cast<int64_t>(static_cast<uint32_t>(first) / static_cast<uint32_t>(page_size));
    if (page * page_size != first) return -1;
    uint64_t apart = 0;
    for (int64_t s = 1; s < page_size; ++s) apart |= static_cast<uint64_t>(slots[s] ^ static_cast<Index>(first + s));
    if (apart != 0) return -1;
    runs += static_cast<uint64_t>(page) != expected;
    expected = static_cast<uint64_t>(page) + 1;
    pages[p] = page;
    if (packed != nullptr) {
      for (int64_t s = 0; s < page_size; ++s) packed[p * page_size + s] = first + s;
    }
  }
  return runs;
}

// The same for device slots, which only have to be in range.
template <typename Index>
bool scan_device(const Index* slots, int64_t count, int64_t device_slots, int64_t* packed) {
  uint64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    outside |= static_cast<uint64_t>(static_cast<int64_t>(slots[i])) >= static_cast<uint64_t>(device_slots);
  }
  if (outside == 0 && packed != nullptr) std::copy(slots, slots + count, packed);
  return outside == 0;
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
  if (host_slots > INT32_MAX || page_size > host_slots) return page_count.value == 0 ? 0 : -1;  // planes have fewer
  const void* host = static_cast<const char*>(host_indices.data_ptr()) + host_indices.byte_offset();
  const int64_t runs =
      host_indices.dtype().bits == 64
          ? scan_host(static_cast<const int64_t*>(host), page_count.value, page_size, host_slots, page_out, packed_out)
          : scan_host(static_cast<const int32_t*>(host), page_count.value, page_size, host_slots, page_out, packed_out);
  if (runs < 0 || device_count.value == 0) return runs;
  const void* device = static_cast<const char*>(device_indices.data_ptr()) + device_indices.byte_offset();
  int64_t* device_out = packed_out == nullptr ? nullptr : packed_out + slots.value;
  const bool inside =
      device_indices.dtype().bits == 64
          ? scan_device(static_cast<const int64_t*>(device), device_count.value, device_slots, device_out)
          : scan_device(static_cast<const int32_t*>(device), device_count.value, device_slots, device_out);
  return inside ? runs : -1;
}

}  // namespace hicache
