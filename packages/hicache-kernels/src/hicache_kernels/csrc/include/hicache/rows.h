// Moves rows between two strided spaces: the one loop that both modules run, as a kernel and as a CPU function.
//
// A space is a list of row bases and a slot rule: row r of slot s starts at
//   base + bases[r] + (s / block) * block_stride + (s % block) * slot_stride
// and slot number i of the operation is indices[i], or i itself where there are no indices (staging memory).
#pragma once

#include <hicache/checks.h>
#include <hicache/memory.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(HICACHE_GPU)
#define HICACHE_BOTH __host__ __device__ __forceinline__
#else
#define HICACHE_BOTH inline
#endif

namespace hicache {

// Quotients by a divisor known at launch, for numerators below 2^31.
struct Divisor {
  uint32_t value = 1;
  uint32_t magic = 1;
  uint32_t shift = 0;

  Divisor() = default;
  explicit Divisor(uint32_t divisor) : value(divisor) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  HICACHE_BOTH uint32_t quotient(uint32_t n) const {
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * magic) >> 32);
    return (high + n) >> shift;
  }
};

struct Space {
  const int64_t* bases;  // offsets or addresses of the rows, added to base; null where there is one row at base
  uint64_t base;
  int64_t block_stride;
  int64_t slot_stride;
  Divisor block;

  HICACHE_BOTH uint64_t start(uint32_t row) const {
    return base + (bases != nullptr ? static_cast<uint64_t>(bases[row]) : 0);
  }
  HICACHE_BOTH uint64_t offset(uint32_t slot) const {
    const uint32_t outer = block.quotient(slot);
    const uint32_t inner = slot - outer * block.value;
    return static_cast<uint64_t>(outer * block_stride) + static_cast<uint64_t>(inner * slot_stride);
  }
  HICACHE_BOTH uint64_t address(uint32_t row, uint32_t slot) const { return start(row) + offset(slot); }
};

// Rows of one size and one pair of spaces. The units are walked as (slots / inner, rows, inner slots, vectors).
struct Group {
  Space source;
  Space destination;
  int64_t rows;
  int64_t row_bytes;
  int64_t inner;  // slots that are neighbours in the walk for one row; 0: all
  int64_t vector_bytes;
};

// One row of the int64 tensor that describes groups; Python writes it (rows.py, GROUP_FIELDS).
constexpr int64_t kSpaceFields = 5;
constexpr int64_t kGroupFields = 2 * kSpaceFields + 4;

inline Space read_space(const int64_t* f) {
  Space space;
  space.bases = reinterpret_cast<const int64_t*>(f[0]);
  space.base = static_cast<uint64_t>(f[1]);
  space.block = Divisor(static_cast<uint32_t>(f[2]));
  space.block_stride = f[3];
  space.slot_stride = f[4];
  return space;
}

inline std::vector<Group> read_groups(const tvm::ffi::TensorView& groups, const char* name) {
  Symbol count{"groups"}, fields{"fields of a group", kGroupFields};
  TensorCheck(groups, name).on_cpu().integers({64}).shape({&count, &fields});
  std::vector<Group> result;
  const int64_t* f = int64_data(groups);
  for (int64_t g = 0; g < count.value; ++g, f += kGroupFields) {
    Group group{read_space(f), read_space(f + kSpaceFields), f[10], f[11], f[12], f[13]};
    result.push_back(group);
  }
  return result;
}

// Slot indices of one operation: int32 or int64, or none for the identity.
struct Indices {
  const void* data = nullptr;
  bool wide = true;

  Indices() = default;
  explicit Indices(const tvm::ffi::TensorView& tensor)
      : data(static_cast<const char*>(tensor.data_ptr()) + tensor.byte_offset()), wide(tensor.dtype().bits == 64) {}

  Indices from(int64_t first) const {
    Indices result = *this;
    if (data != nullptr) result.data = static_cast<const char*>(data) + first * (wide ? 8 : 4);
    return result;
  }
};

#if defined(HICACHE_GPU)

constexpr int kMaxThreads = 1024;
constexpr int kUnroll = 4;
constexpr int kGroupsPerLaunch = 8;
// Neighbouring bytes that threads touch at once at least where a unit is several vectors. Between device memories a line
// of the caches will do. Across the bus it is what a warp touches, and whole multiples of it: pieces of other lengths split
// its packets (rows of 576 and 1152 bytes lost a fifth to a third of the bandwidth on an H200).
constexpr int64_t kShortestStretch = 128;
constexpr int64_t kWarpVectors = 32;
// Vectors of a group in one launch: with the largest grid's stride added it stays below 2^31.
#if !defined(HICACHE_MAX_VECTORS)
#define HICACHE_MAX_VECTORS (int64_t{1} << 30)
#endif

struct DeviceGroup {
  Space source;
  Space destination;
  Divisor columns, inner, rows;
  uint32_t units;
  bool spread;  // a unit is kUnroll vectors, columns.value vectors apart
};

struct Launch {
  DeviceGroup groups[kGroupsPerLaunch];
  int count;
  uint32_t layers;  // each is `rows` later in the tables of row bases
  uint32_t* done;   // per layer, the warps that have finished it; null where it is not wanted
  const void* source_indices;
  const void* destination_indices;
};

template <typename Index>
__device__ __forceinline__ uint32_t slot_at(const void* indices, uint32_t position) {
  return indices == nullptr ? position : static_cast<uint32_t>(static_cast<const Index*>(indices)[position]);
}

// Which vector of which row of which slot a unit is.
struct Place {
  uint32_t position;
  uint32_t row;
  uint32_t column;
};

__device__ __forceinline__ Place place_of(const DeviceGroup& group, uint32_t unit) {
  const uint32_t line = group.columns.quotient(unit);
  const uint32_t pair = group.inner.quotient(line);
  const uint32_t outer = group.rows.quotient(pair);
  return Place{outer * group.inner.value + (line - pair * group.inner.value), pair - outer * group.rows.value,
               unit - line * group.columns.value};
}

// Moves a group's rows of one layer. A unit is one vector of a row, or kUnroll vectors at equal distances, found by one
// look-up.
template <int Bytes, typename Index>
__device__ __forceinline__ void move_group(const Launch& launch, const DeviceGroup& group, uint32_t first_row) {
  const uint32_t stride = gridDim.x * blockDim.x;
  uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (group.spread) {
    const uint32_t step = group.columns.value * Bytes;
    for (; unit < group.units; unit += stride) {
      const Place place = place_of(group, unit);
      const uint32_t source_slot = slot_at<Index>(launch.source_indices, place.position);
      const uint32_t destination_slot = slot_at<Index>(launch.destination_indices, place.position);
      const uint64_t from = group.source.address(first_row + place.row, source_slot) + place.column * Bytes;
      const uint64_t to = group.destination.address(first_row + place.row, destination_slot) + place.column * Bytes;
      Words<Bytes> words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) load_nc(words[u], from + u * step);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_nc(to + u * step, words[u]);
    }
    return;
  }
  for (; unit < group.units; unit += kUnroll * stride) {
    // Each step for all units before the next one, so that their latencies overlap. Past the end the last unit is read
    // again and not written: the last pass waits once and not kUnroll times.
    Place places[kUnroll];
    uint32_t source_slots[kUnroll], destination_slots[kUnroll];
    uint64_t from[kUnroll], to[kUnroll];
    Words<Bytes> words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t wanted = unit + u * stride;
      places[u] = place_of(group, wanted < group.units ? wanted : group.units - 1);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      source_slots[u] = slot_at<Index>(launch.source_indices, places[u].position);
      destination_slots[u] = slot_at<Index>(launch.destination_indices, places[u].position);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      from[u] = group.source.address(first_row + places[u].row, source_slots[u]) + places[u].column * Bytes;
      to[u] = group.destination.address(first_row + places[u].row, destination_slots[u]) + places[u].column * Bytes;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_nc(words[u], from[u]);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (unit + u * stride < group.units) store_nc(to[u], words[u]);
    }
  }
}

template <int Bytes, typename Index>
__global__ void __launch_bounds__(kMaxThreads) move_rows_kernel(const HICACHE_GRID_CONSTANT Launch launch) {
  for (uint32_t layer = 0; layer < launch.layers; ++layer) {
    for (int g = 0; g < launch.count; ++g) {
      const DeviceGroup& group = launch.groups[g];
      move_group<Bytes, Index>(launch, group, layer * group.rows.value);
    }
    // A warp goes on as soon as its own share of the layer is done, so the bus never idles between layers.
    if (launch.done != nullptr) count_warp(launch.done + layer);
  }
}

template <int Bytes>
void launch_rows(const Launch& launch, bool wide, int blocks, int threads, gpuStream_t stream) {
  if (wide) {
    HICACHE_LAUNCH((move_rows_kernel<Bytes, int64_t>), blocks, threads, stream, launch);
  } else {
    HICACHE_LAUNCH((move_rows_kernel<Bytes, int32_t>), blocks, threads, stream, launch);
  }
  check_gpu(gpuGetLastError(), "launching the row kernel");
}

// Returns the CTAs it launched: no more than there is work for.
inline int launch_width(const Launch& launch, int64_t width, bool wide, int blocks, int threads, gpuStream_t stream) {
  uint32_t most = 1;
  for (int g = 0; g < launch.count; ++g) most = std::max(most, launch.groups[g].units);
  blocks = std::max(1, std::min<int>(blocks, static_cast<int>((most + threads - 1) / threads)));
  if (width == 16) {
    launch_rows<16>(launch, wide, blocks, threads, stream);
  } else if (width == 8) {
    launch_rows<8>(launch, wide, blocks, threads, stream);
  } else {
    launch_rows<4>(launch, wide, blocks, threads, stream);
  }
  return blocks;
}

// How `count` slots of a group are walked.
inline DeviceGroup device_group(const Group& group, int64_t count, bool on_device) {
  DeviceGroup target;
  target.source = group.source;
  target.destination = group.destination;
  const int64_t vectors = group.row_bytes / group.vector_bytes;
  target.spread = vectors % kUnroll == 0 && (on_device ? group.row_bytes / kUnroll >= kShortestStretch
                                                       : vectors / kUnroll % kWarpVectors == 0);
  const int64_t columns = target.spread ? vectors / kUnroll : vectors;
  target.columns = Divisor(static_cast<uint32_t>(columns));
  target.inner = Divisor(static_cast<uint32_t>(group.inner == 0 ? count : group.inner));
  target.rows = Divisor(static_cast<uint32_t>(group.rows));
  target.units = static_cast<uint32_t>(count * group.rows * columns);
  return target;
}

// Queues the move of `slots` slots of every group; one launch unless groups differ in vector width or are huge.
inline void move_rows(const std::vector<Group>& groups, int64_t slots, const Indices& source_indices,
                      const Indices& destination_indices, int blocks, int threads, gpuStream_t stream) {
  const bool wide = source_indices.data != nullptr ? source_indices.wide : destination_indices.wide;
  for (int64_t width : {16, 8, 4}) {
    int64_t part = slots;
    bool any = false;
    for (const Group& group : groups) {
      if (group.vector_bytes != width) continue;
      any = true;
      const int64_t inner = std::max<int64_t>(1, group.inner);
      const int64_t fits = HICACHE_MAX_VECTORS / (group.rows * (group.row_bytes / width));
      part = std::min(part, std::max(fits / inner * inner, inner));
    }
    if (!any) continue;
    // A later part of a space without indices starts at a whole block.
    for (const Group& group : groups) {
      if (part == slots) break;
      if (source_indices.data == nullptr) part = std::max<int64_t>(part / group.source.block.value, 1) * group.source.block.value;
      if (destination_indices.data == nullptr) {
        part = std::max<int64_t>(part / group.destination.block.value, 1) * group.destination.block.value;
      }
    }
    for (int64_t first = 0; first < slots; first += part) {
      const int64_t count = std::min(part, slots - first);
      Launch launch;
      launch.count = 0;
      launch.layers = 1;
      launch.done = nullptr;
      launch.source_indices = source_indices.from(first).data;
      launch.destination_indices = destination_indices.from(first).data;
      for (const Group& group : groups) {
        if (group.vector_bytes != width) continue;
        DeviceGroup& target = launch.groups[launch.count++];
        target = device_group(group, count, source_indices.data == nullptr || destination_indices.data == nullptr);
        // Where a space counts slots by position, a later part starts later.
        if (source_indices.data == nullptr) target.source.base += first / target.source.block.value * target.source.block_stride;
        if (destination_indices.data == nullptr) {
          target.destination.base += first / target.destination.block.value * target.destination.block_stride;
        }
        if (launch.count == kGroupsPerLaunch) {
          launch_width(launch, width, wide, blocks, threads, stream);
          launch.count = 0;
        }
      }
      if (launch.count > 0) launch_width(launch, width, wide, blocks, threads, stream);
    }
  }
}

// Queues the move of `layers` layers in order as one launch; groups describe the first, and both sides have indices.
// done: per layer, where warps are counted. Returns what the counts reach, or 0, with nothing queued, where it takes more
// than one launch.
inline uint32_t move_layers(const std::vector<Group>& groups, int64_t slots, const Indices& source_indices,
                            const Indices& destination_indices, int64_t layers, uint32_t* done, int blocks, int threads,
                            gpuStream_t stream) {
  if (groups.empty() || groups.size() > kGroupsPerLaunch) return 0;
  Launch launch;
  launch.count = 0;
  launch.layers = static_cast<uint32_t>(layers);
  launch.done = done;
  launch.source_indices = source_indices.data;
  launch.destination_indices = destination_indices.data;
  const int64_t width = groups.front().vector_bytes;
  for (const Group& group : groups) {
    if (group.vector_bytes != width || slots * group.rows * (group.row_bytes / width) > HICACHE_MAX_VECTORS) return 0;
    launch.groups[launch.count++] = device_group(group, slots, false);
  }
  blocks = launch_width(launch, width, source_indices.wide, blocks, threads, stream);
  return static_cast<uint32_t>(blocks * (threads / 32));
}

#else

// The same move with memcpy, joining rows that are neighbours on both sides.
inline void move_rows(const std::vector<Group>& groups, int64_t slots, const Indices& source_indices,
                      const Indices& destination_indices) {
  auto slot_at = [](const Indices& indices, int64_t i) -> uint32_t {
    if (indices.data == nullptr) return static_cast<uint32_t>(i);
    return static_cast<uint32_t>(indices.wide ? static_cast<const int64_t*>(indices.data)[i]
                                              : static_cast<const int32_t*>(indices.data)[i]);
  };
  for (const Group& group : groups) {
    const int64_t inner = group.inner == 0 ? std::max<int64_t>(1, slots) : group.inner;
    uint64_t from = 0, to = 0, bytes = 0;
    auto flush = [&] {
      if (bytes > 0) std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    };
    for (int64_t outer = 0; outer < slots; outer += inner) {
      for (int64_t row = 0; row < group.rows; ++row) {
        for (int64_t i = outer; i < std::min(outer + inner, slots); ++i) {
          const uint64_t source = group.source.address(row, slot_at(source_indices, i));
          const uint64_t destination = group.destination.address(row, slot_at(destination_indices, i));
          if (bytes > 0 && source == from + bytes && destination == to + bytes) {
            bytes += group.row_bytes;
            continue;
          }
          flush();
          from = source;
          to = destination;
          bytes = group.row_bytes;
        }
      }
    }
    flush();
  }
}

#endif

}  // namespace hicache
