// Entry points of the main module: rows moved by the SMs (CPU build: by the caller's thread), in either direction.
#pragma once

#include <hicache/indices.h>
#include <hicache/rows.h>

namespace hicache {

// groups: int64 [groups, kGroupFields] in CPU memory. Index tensors: int32 or int64 [slots], both of one width, where the
// kernels can read them. blocks, threads: shape of the grid. stream: handle of the stream to queue on.
inline void move_rows_entry(tvm::ffi::TensorView groups, tvm::ffi::TensorView source_indices,
                            tvm::ffi::TensorView destination_indices, [[maybe_unused]] int64_t blocks,
                            [[maybe_unused]] int64_t threads, [[maybe_unused]] int64_t stream) {
  Symbol slots{"slots"};
  TensorCheck(source_indices, "source_indices").on_device().integers({32, 64}).shape({&slots});
  TensorCheck(destination_indices, "destination_indices").on_device().integers({32, 64}).shape({&slots});
  if (source_indices.dtype().bits != destination_indices.dtype().bits) {
    TVM_FFI_THROW(TypeError) << "source_indices has " << static_cast<int>(source_indices.dtype().bits)
                             << " bits and destination_indices " << static_cast<int>(destination_indices.dtype().bits)
                             << "; both must have the same";
  }
  const std::vector<Group> list = read_groups(groups, "groups");
  if (slots.value == 0) return;
#if defined(HICACHE_GPU)
  if (blocks < 1) TVM_FFI_THROW(ValueError) << "blocks is " << blocks << "; it must be at least 1";
  if (threads < 32 || threads > kMaxThreads || threads % 32 != 0) {
    TVM_FFI_THROW(ValueError) << "threads is " << threads << "; it must be a multiple of 32 up to " << kMaxThreads;
  }
  move_rows(list, slots.value, Indices(source_indices), Indices(destination_indices), static_cast<int>(blocks),
            static_cast<int>(threads), reinterpret_cast<gpuStream_t>(stream));
#else
  move_rows(list, slots.value, Indices(source_indices), Indices(destination_indices));
#endif
}

}  // namespace hicache

TVM_FFI_DLL_EXPORT_TYPED_FUNC(move_rows, hicache::move_rows_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scan_indices, hicache::scan_indices_entry);
