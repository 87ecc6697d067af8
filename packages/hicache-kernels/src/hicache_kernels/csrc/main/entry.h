// Entry points of the main module: rows moved by the SMs (CPU build: by the caller's thread), in either direction.
#pragma once

#include <hicache/indices.h>
#include <hicache/rows.h>

#include "bulk_rows.h"

namespace hicache {

inline void check_indices(const tvm::ffi::TensorView& source_indices, const tvm::ffi::TensorView& destination_indices,
                          Symbol& slots) {
  TensorCheck(source_indices, "source_indices").on_device().integers({32, 64}).shape({&slots});
  TensorCheck(destination_indices, "destination_indices").on_device().integers({32, 64}).shape({&slots});
  if (source_indices.dtype().bits != destination_indices.dtype().bits) {
    TVM_FFI_THROW(TypeError) << "source_indices has " << static_cast<int>(source_indices.dtype().bits)
                             << " bits and destination_indices " << static_cast<int>(destination_indices.dtype().bits)
                             << "; both must have the same";
  }
}

inline void check_grid(int64_t blocks, int64_t threads) {
#if defined(HICACHE_GPU)
  if (blocks < 1) TVM_FFI_THROW(ValueError) << "blocks is " << blocks << "; it must be at least 1";
  if (threads < 32 || threads > kMaxThreads || threads % 32 != 0) {
    TVM_FFI_THROW(ValueError) << "threads is " << threads << "; it must be a multiple of 32 up to " << kMaxThreads;
  }
#else
  static_cast<void>(blocks);
  static_cast<void>(threads);
#endif
}

// groups: int64 [groups, kGroupFields] in CPU memory. Index tensors: int32 or int64 [slots], both of one width, where the
// kernels can read them. blocks, threads: shape of the grid. bulk: shared memory of a CTA for bulk copies, taken where
// rows and device allow them; 0 for none. stream: handle of the stream to queue on.
inline void move_rows_entry(tvm::ffi::TensorView groups, tvm::ffi::TensorView source_indices,
                            tvm::ffi::TensorView destination_indices, int64_t blocks, int64_t threads,
                            [[maybe_unused]] int64_t bulk, [[maybe_unused]] int64_t stream) {
  Symbol slots{"slots"};
  check_indices(source_indices, destination_indices, slots);
  check_grid(blocks, threads);
  const std::vector<Group> list = read_groups(groups, "groups");
  if (slots.value == 0) return;
#if defined(HICACHE_GPU)
  if (move_in_bulk(list, slots.value, Indices(source_indices), Indices(destination_indices), 1, nullptr,
                   static_cast<int>(blocks), bulk, reinterpret_cast<gpuStream_t>(stream)) > 0) {
    return;
  }
  move_rows(list, slots.value, Indices(source_indices), Indices(destination_indices), static_cast<int>(blocks),
            static_cast<int>(threads), reinterpret_cast<gpuStream_t>(stream));
#else
  move_rows(list, slots.value, Indices(source_indices), Indices(destination_indices));
#endif
}

// The move of several layers in order, one kernel for all: events tell of each layer without a launch a layer.
// groups describe the first layer; every layer is `rows` entries later in both tables. done: int32 [layers] on the
// device, written to. events: int64 [layers], recorded on side_stream once a layer's rows are filled. Returns 1, or 0,
// with no row moved, where the move takes more than one launch or this runtime cannot wait for a kernel's counts.
inline int64_t move_layers_entry([[maybe_unused]] tvm::ffi::TensorView groups, tvm::ffi::TensorView source_indices,
                                 tvm::ffi::TensorView destination_indices, tvm::ffi::TensorView done,
                                 tvm::ffi::TensorView events, int64_t blocks, int64_t threads,
                                 [[maybe_unused]] int64_t bulk, [[maybe_unused]] int64_t stream,
                                 [[maybe_unused]] int64_t side_stream) {
  Symbol slots{"slots"}, layers{"layers"};
  check_indices(source_indices, destination_indices, slots);
  check_grid(blocks, threads);
  TensorCheck(done, "done").on_device().integers({32}).shape({&layers});
  TensorCheck(events, "events").on_cpu().integers({64}).shape({&layers});
#if defined(HICACHE_GPU)
  const std::vector<Group> list = read_groups(groups, "groups");
  if (slots.value == 0 || layers.value == 0 || !gpuCanWaitForValues()) return 0;
  uint32_t* counts = reinterpret_cast<uint32_t*>(static_cast<char*>(done.data_ptr()) + done.byte_offset());
  const Indices source(source_indices), destination(destination_indices);
  const gpuStream_t queue = reinterpret_cast<gpuStream_t>(stream), side = reinterpret_cast<gpuStream_t>(side_stream);
  check_gpu(gpuMemsetAsync(counts, 0, static_cast<size_t>(layers.value) * sizeof(uint32_t), queue), "clearing counts");
  // The first event is free until the first layer is there: after it the side stream sees zeros, and nothing older.
  const gpuEvent_t cleared = reinterpret_cast<gpuEvent_t>(int64_data(events)[0]);
  check_gpu(gpuEventRecord(cleared, queue), "recording an event");
  check_gpu(gpuStreamWaitEvent(side, cleared), "waiting for zeros");
  uint32_t all =
      move_in_bulk(list, slots.value, source, destination, layers.value, counts, static_cast<int>(blocks), bulk, queue);
  if (all == 0) {
    all = move_layers(list, slots.value, source, destination, layers.value, counts, static_cast<int>(blocks),
                      static_cast<int>(threads), queue);
  }
  if (all == 0) return 0;
  for (int64_t layer = 0; layer < layers.value; ++layer) {
    check_gpu(gpuStreamWaitValue(side, counts + layer, all), "waiting for a layer");
    check_gpu(gpuEventRecord(reinterpret_cast<gpuEvent_t>(int64_data(events)[layer]), side), "recording an event");
  }
  return 1;
#else
  return 0;
#endif
}

}  // namespace hicache

TVM_FFI_DLL_EXPORT_TYPED_FUNC(move_rows, hicache::move_rows_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(move_layers, hicache::move_layers_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scan_indices, hicache::scan_indices_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(upload_indices, hicache::upload_indices_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(create_stream, hicache::create_stream_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_address, hicache::device_address_entry);
