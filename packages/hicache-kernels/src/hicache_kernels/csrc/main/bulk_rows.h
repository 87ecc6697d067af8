// Rows moved by the SM's bulk-copy engine (sm_90 and later): a few warps a CTA name rows, which pass through shared memory
// without touching a register. For rows of some hundred bytes and more.
#pragma once

#include <hicache/rows.h>

namespace hicache {

#if defined(HICACHE_CUDA)

constexpr int kBulkLanes = 32;
constexpr int kBulkWarps = 4;
constexpr int kMaxStages = 16;
constexpr int64_t kLeastBulkRow = 256;
constexpr int64_t kMostBulkRow = 16 << 10;
constexpr int64_t kMostStageBytes = 32 << 10;

struct BulkLaunch {
  DeviceGroup group;
  uint32_t row_bytes;
  uint32_t lanes;   // rows of a stage
  uint32_t stages;  // of shared memory, at least 3
  uint32_t layers;
  uint32_t* done;  // per layer, the warps that have finished it; null where it is not wanted
  const void* source_indices;
  const void* destination_indices;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity) {
  uint32_t over = 0;
  while (over == 0) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Batches of `lanes` rows go round through the stages: while one is written out, the others are being read.
template <typename Index>
__device__ __forceinline__ void bulk_rows(const BulkLaunch& launch) {
  extern __shared__ __align__(128) unsigned char stage_memory[];
  __shared__ __align__(8) uint64_t all_full[kBulkWarps][kMaxStages];
  __shared__ uint64_t all_targets[kBulkWarps][kMaxStages][kBulkLanes];
  const DeviceGroup& group = launch.group;
  // Warps have nothing to do with each other: each works through every count-th batch, in stages of its own.
  const uint32_t warp = threadIdx.x / kBulkLanes, lane = threadIdx.x % kBulkLanes, count = gridDim.x * kBulkWarps;
  const uint32_t first_batch = blockIdx.x * kBulkWarps + warp;
  uint64_t(&full)[kMaxStages] = all_full[warp];
  uint64_t(&targets)[kMaxStages][kBulkLanes] = all_targets[warp];
  const uint32_t batches = (group.units + launch.lanes - 1) / launch.lanes;
  const uint32_t stage_bytes = launch.lanes * launch.row_bytes;
  const uint32_t own = shared_address(stage_memory) + warp * launch.stages * stage_bytes + lane * launch.row_bytes;
  if (lane == 0) {
    for (uint32_t s = 0; s < launch.stages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  __syncwarp();

  // The rows of the next batch are looked up a batch ahead, and only then is waited for what the look-up found: it takes as
  // long as reading a batch does.
  uint32_t ahead_layer = 0, ahead_batch = first_batch, source_slot = 0, destination_slot = 0;
  uint64_t source_start = 0, destination_start = 0;
  auto look_up = [&] {
    const uint32_t unit = ahead_batch * launch.lanes + lane;
    if (ahead_layer >= launch.layers || lane >= launch.lanes || unit >= group.units) return;
    const Place place = place_of(group, unit);
    const uint32_t row = ahead_layer * group.rows.value + place.row;
    source_slot = slot_at<Index>(launch.source_indices, place.position);
    destination_slot = slot_at<Index>(launch.destination_indices, place.position);
    source_start = group.source.start(row);
    destination_start = group.destination.start(row);
  };
  auto read = [&](uint32_t stage) {
    if (ahead_layer >= launch.layers || ahead_batch >= batches) return;
    const uint32_t left = group.units - ahead_batch * launch.lanes;
    const uint32_t rows = left < launch.lanes ? left : launch.lanes;
    if (lane == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full[stage])),
                   "r"(rows * launch.row_bytes)
                   : "memory");
    }
    __syncwarp();
    if (lane < rows) {
      const uint64_t from = source_start + group.source.offset(source_slot);
      targets[stage][lane] = destination_start + group.destination.offset(destination_slot);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              own + stage * stage_bytes),
          "l"(from), "r"(launch.row_bytes), "r"(shared_address(&full[stage]))
          : "memory");
    }
    ahead_batch += count;
    if (ahead_batch >= batches) {
      ahead_batch = first_batch;
      ++ahead_layer;
    }
    look_up();
  };

  look_up();
  for (uint32_t s = 0; s + 1 < launch.stages; ++s) read(s);
  uint32_t stage = 0, parity = 0, before = launch.stages - 1;
  for (uint32_t layer = 0; layer < launch.layers; ++layer) {
    for (uint32_t batch = first_batch; batch < batches; batch += count) {
      wait_for_phase(shared_address(&full[stage]), parity);
      if (lane < launch.lanes && batch * launch.lanes + lane < group.units) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(targets[stage][lane]),
                     "r"(own + stage * stage_bytes), "r"(launch.row_bytes)
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      // The stage of the batch before this one may be filled again once it has been read out.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      __syncwarp();
      read(before);
      before = stage;
      if (++stage == launch.stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if (launch.done != nullptr) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
      __threadfence();
      __syncwarp();
      if (lane == 0) atomicAdd(launch.done + layer, 1u);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif

template <typename Index>
__global__ void __launch_bounds__(kBulkWarps* kBulkLanes)
    bulk_rows_kernel([[maybe_unused]] const __grid_constant__ BulkLaunch launch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  bulk_rows<Index>(launch);
#endif
}

// Dynamic shared memory that a CTA of the kernel may take; 0 where the device has no bulk copies, or runs code of an
// architecture that has none, in which the kernel is empty.
inline int64_t bulk_memory(const void* kernel) {
  int device = 0, most = 0;
  cudaFuncAttributes attributes;
  if (cudaGetDevice(&device) != cudaSuccess || cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess ||
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    static_cast<void>(gpuGetLastError());
    return 0;
  }
  if (attributes.ptxVersion < 90 || attributes.binaryVersion < 90) return 0;
  return most - static_cast<int64_t>(attributes.sharedSizeBytes);
}

// Queues the move of `layers` layers in order as bulk copies through `shared_bytes` of shared memory a CTA; done as in
// move_layers. Returns what the counts reach, or 0, with nothing queued, where rows or device do not
// allow it.
inline uint32_t move_in_bulk(const std::vector<Group>& groups, int64_t slots, const Indices& source_indices,
                             const Indices& destination_indices, int64_t layers, uint32_t* done, int blocks,
                             int64_t shared_bytes, gpuStream_t stream) {
  if (shared_bytes <= 0 || groups.size() != 1) return 0;
  const Group& group = groups.front();
  const int64_t units = slots * group.rows;
  if (group.vector_bytes != 16 || group.row_bytes < kLeastBulkRow || group.row_bytes > kMostBulkRow ||
      units > HICACHE_MAX_VECTORS) {
    return 0;
  }
  const auto kernel = source_indices.wide ? bulk_rows_kernel<int64_t> : bulk_rows_kernel<int32_t>;
  shared_bytes = std::min(shared_bytes, bulk_memory(reinterpret_cast<const void*>(kernel)));
  const int64_t warp_bytes = shared_bytes / kBulkWarps;
  const int64_t stage_rows = std::min(kMostStageBytes, warp_bytes / 4) / group.row_bytes;
  const int64_t lanes = std::min<int64_t>(kBulkLanes, std::max<int64_t>(1, stage_rows));
  const int64_t stages = std::min<int64_t>(kMaxStages, warp_bytes / (lanes * group.row_bytes));
  if (stages < 3) return 0;  // rows too long for the memory there is, or no memory at all
  BulkLaunch launch;
  launch.group = device_group(group, slots, false);
  launch.group.units = static_cast<uint32_t>(units);
  launch.group.columns = Divisor(1);
  launch.row_bytes = static_cast<uint32_t>(group.row_bytes);
  launch.lanes = static_cast<uint32_t>(lanes);
  launch.stages = static_cast<uint32_t>(stages);
  launch.layers = static_cast<uint32_t>(layers);
  launch.done = done;
  launch.source_indices = source_indices.data;
  launch.destination_indices = destination_indices.data;
  const int64_t batches = (units + lanes - 1) / lanes;
  blocks = static_cast<int>(std::min<int64_t>(blocks, (batches + kBulkWarps - 1) / kBulkWarps));
  const size_t shared = static_cast<size_t>(kBulkWarps * stages * lanes * group.row_bytes);
  check_gpu(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
            "taking shared memory");
  kernel<<<blocks, kBulkWarps * kBulkLanes, shared, stream>>>(launch);
  check_gpu(gpuGetLastError(), "launching the bulk-copy kernel");
  return static_cast<uint32_t>(blocks * kBulkWarps);
}

#elif defined(HICACHE_GPU)

inline uint32_t move_in_bulk(const std::vector<Group>&, int64_t, const Indices&, const Indices&, int64_t, uint32_t*, int,
                             int64_t, gpuStream_t) {
  return 0;
}

#endif

}  // namespace hicache
