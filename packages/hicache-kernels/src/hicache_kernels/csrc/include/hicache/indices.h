// Reads an operation's indices on the CPU in one pass (range, whole pages, runs), and uploads those that kernels read.
#pragma once

#include <hicache/checks.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace hicache {

inline int64_t index_at(const tvm::ffi::TensorView& tensor, int64_t i) {
  const char* data = static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
  return tensor.dtype().bits == 64 ? reinterpret_cast<const int64_t*>(data)[i] : reinterpret_cast<const int32_t*>(data)[i];
}

inline const void* index_data(const tvm::ffi::TensorView& tensor) {
  return static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset();
}

// One pass over host slots: whole pages in range, their numbers (where pages is not null), the runs they form. -1 where
// one is not.
template <typename Index>
int64_t scan_host(const Index* slots, int64_t page_count, int64_t page_size, int64_t host_slots, int64_t* pages) {
  int64_t runs = 0;
  uint64_t expected = ~uint64_t{0};  // the page that would continue the run
  if (page_size == 1) {
    uint64_t outside = 0;
    for (int64_t p = 0; p < page_count; ++p) {
      const int64_t page = slots[p];
      outside |= static_cast<uint64_t>(page) >= static_cast<uint64_t>(host_slots);
      runs += static_cast<uint64_t>(page) != expected;
      expected = static_cast<uint64_t>(page) + 1;
    }
    if (outside != 0) return -1;
    if (pages != nullptr) std::copy(slots, slots + page_count, pages);
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
    if (pages != nullptr) pages[p] = page;
  }
  return runs;
}

// The same for device slots, which only have to be in range.
template <typename Index>
bool scan_device(const Index* slots, int64_t count, int64_t device_slots) {
  uint64_t outside = 0;
  for (int64_t i = 0; i < count; ++i) {
    outside |= static_cast<uint64_t>(static_cast<int64_t>(slots[i])) >= static_cast<uint64_t>(device_slots);
  }
  return outside == 0;
}

inline bool is_index_list(const tvm::ffi::TensorView& tensor) {
  const DLDataType type = tensor.dtype();
  return tensor.ndim() == 1 && tensor.IsContiguous() && type.code == kDLInt && type.lanes == 1 &&
         (type.bits == 32 || type.bits == 64);
}

inline bool lies_on_cpu(const tvm::ffi::TensorView& tensor) {
  const DLDeviceType type = tensor.device().device_type;
  return type == kDLCPU || type == kDLGPUHost;
}

// host_indices: int32 or int64 [slots] in CPU memory. device_indices: the same, or on the device `device_id`, where its
// values are not looked at. pages: int64 [slots / page_size], receives the host pages, or [0] where they are not wanted. stream: the
// caller's. Returns the runs of neighbouring host pages, or -1 where anything is not as it must be, or must be looked at
// more closely (a stream that is captured, indices on the device that are to be checked): the caller then does that, and
// says what is wrong.
inline int64_t scan_indices_entry(tvm::ffi::TensorView host_indices, tvm::ffi::TensorView device_indices,
                                  tvm::ffi::TensorView pages, int64_t page_size, int64_t host_slots, int64_t device_slots,
                                  [[maybe_unused]] int64_t device_id, [[maybe_unused]] int64_t stream) {
  if (!is_index_list(host_indices) || !is_index_list(device_indices) || !lies_on_cpu(host_indices)) return -1;
  const int64_t slots = host_indices.size(0);
  if (device_indices.size(0) != slots || page_size < 1 || slots % page_size != 0) return -1;
  const bool on_cpu = lies_on_cpu(device_indices);
#if defined(HICACHE_GPU)
  if (!on_cpu) {
    const char* asked = std::getenv("HICACHE_KERNELS_CHECK");
    if (asked != nullptr && std::strcmp(asked, "1") == 0) return -1;
    if (device_indices.device().device_type != kDLGPU || device_indices.device().device_id != device_id) return -1;
  }
  if (gpuIsCapturing(reinterpret_cast<gpuStream_t>(stream))) return -1;
#else
  if (!on_cpu) return -1;
#endif
  Symbol page_count{"pages"};
  TensorCheck(pages, "pages").on_cpu().integers({64}).shape({&page_count});
  if (page_count.value != 0 && page_count.value * page_size != slots) return -1;
  int64_t* page_out = page_count.value == 0 ? nullptr : static_cast<int64_t*>(pages.data_ptr());
  if (host_slots > INT32_MAX || page_size > host_slots) return slots == 0 ? 0 : -1;  // planes have fewer
  const void* host = index_data(host_indices);
  const int64_t runs =
      host_indices.dtype().bits == 64
          ? scan_host(static_cast<const int64_t*>(host), slots / page_size, page_size, host_slots, page_out)
          : scan_host(static_cast<const int32_t*>(host), slots / page_size, page_size, host_slots, page_out);
  if (runs < 0 || !on_cpu) return runs;
  const void* device = index_data(device_indices);
  const bool inside = device_indices.dtype().bits == 64
                          ? scan_device(static_cast<const int64_t*>(device), slots, device_slots)
                          : scan_device(static_cast<const int32_t*>(device), slots, device_slots);
  return inside ? runs : -1;
}

// Queues the upload of one or two lists of indices (the second may be empty), widened to 64 bits, one after the other.
// pinned, on_device: int64, at least as long as both together; pinned belongs to this upload until the stream is past it.
inline void upload_indices_entry(tvm::ffi::TensorView first, tvm::ffi::TensorView second, tvm::ffi::TensorView pinned,
                                 tvm::ffi::TensorView on_device, [[maybe_unused]] int64_t stream) {
  Symbol first_count{"first"}, second_count{"second"}, pinned_count{"pinned"}, device_count{"on_device"};
  TensorCheck(first, "first").on_cpu().integers({32, 64}).shape({&first_count});
  TensorCheck(second, "second").on_cpu().integers({32, 64}).shape({&second_count});
  TensorCheck(pinned, "pinned").on_cpu().integers({64}).shape({&pinned_count});
  TensorCheck(on_device, "on_device").on_device().integers({64}).shape({&device_count});
  const int64_t count = first_count.value + second_count.value;
  if (count > pinned_count.value || count > device_count.value) {
    TVM_FFI_THROW(ValueError) << count << " indices; pinned has room for " << pinned_count.value << ", on_device for "
                              << device_count.value;
  }
  int64_t* out = static_cast<int64_t*>(pinned.data_ptr());
  for (const tvm::ffi::TensorView* list : {&first, &second}) {
    const int64_t length = list->size(0);
    const void* data = index_data(*list);
    if (list->dtype().bits == 64) {
      std::copy_n(static_cast<const int64_t*>(data), length, out);
    } else {
      std::copy_n(static_cast<const int32_t*>(data), length, out);
    }
    out += length;
  }
#if defined(HICACHE_GPU)
  check_gpu(gpuMemcpyAsync(on_device.data_ptr(), pinned.data_ptr(), static_cast<size_t>(count) * sizeof(int64_t), false,
                           reinterpret_cast<gpuStream_t>(stream)),
            "uploading indices");
#else
  std::memcpy(on_device.data_ptr(), pinned.data_ptr(), static_cast<size_t>(count) * sizeof(int64_t));
#endif
}

}  // namespace hicache
