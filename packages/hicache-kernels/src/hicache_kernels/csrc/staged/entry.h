// Entry points of the staged module: pages are laid out in staging memory as on the host, and the copy engine moves them.
//
// An operation is cut into chunks of pages, one staging buffer each. Rows are moved on the caller's stream, copies run on
// a stream of their own, and two events a buffer order them: `staged` (what the first of the two wrote is complete) and
// `drained` (the second is done with the buffer). Operations of other streams order themselves by the same events.
#pragma once

#include <hicache/indices.h>
#include <hicache/rows.h>

#include "copies.h"
#include "runs.h"
#if defined(HICACHE_GPU)
#include "gpu_backend.h"
#else
#include "cpu_backend.h"
#endif

namespace hicache {

struct Operation {
  std::vector<Piece> pieces;
  std::vector<Group> groups;
  const int64_t* pages;
  int64_t page_count;
  Indices slots;
  int64_t page_size;
  int64_t chunk_pages;
  const int64_t* buffers;  // per buffer: address, staged event, drained event
  int64_t buffer_count;
  int64_t cursor;
  const int64_t* boundaries;
  int64_t boundary_count;

  int64_t chunks() const { return (page_count + chunk_pages - 1) / chunk_pages; }

  // Pages of the first chunk of a write-back: fewer where others follow, so that the copies start sooner. That takes one
  // buffer more than chunks() says at most.
  int64_t first_chunk() const { return page_count <= chunk_pages ? page_count : (chunk_pages + 3) / 4; }

  // Copies of pages [first, first + count) of the operation, neighbouring host pages joined.
  void plan(int64_t first, int64_t count, int64_t layer, uint64_t staging, std::vector<Copy>& copies) const {
    copies.clear();
    for (const Piece& piece : pieces) {
      for (int64_t i = 0; i < count;) {
        int64_t length = 1;
        while (i + length < count && pages[first + i + length] == pages[first + i] + length) ++length;
        append_run(piece, staging, pages[first + i], i, length, layer, boundaries, boundary_count, copies);
        i += length;
      }
    }
  }
};

inline Operation read_operation(const tvm::ffi::TensorView& pieces, const tvm::ffi::TensorView& groups,
                                const tvm::ffi::TensorView& pages, const tvm::ffi::TensorView& slots,
                                const tvm::ffi::TensorView& buffers, const tvm::ffi::TensorView& boundaries,
                                int64_t page_size, int64_t chunk_pages, int64_t cursor) {
  Symbol page_count{"pages"}, slot_count{"slots"}, buffer_count{"buffers"}, three{"fields of a buffer", 3};
  Symbol boundary_count{"boundaries"};
  TensorCheck(pages, "host pages").on_cpu().integers({64}).shape({&page_count});
  slot_count.value = page_count.value * page_size;
  TensorCheck(slots, "device_indices").on_device().integers({32, 64}).shape({&slot_count});
  TensorCheck(buffers, "staging buffers").on_cpu().integers({64}).shape({&buffer_count, &three});
  TensorCheck(boundaries, "boundaries").on_cpu().integers({64}).shape({&boundary_count});
  if (chunk_pages < 1) TVM_FFI_THROW(ValueError) << "chunk_pages is " << chunk_pages << "; it must be at least 1";
  if (buffer_count.value < 1) TVM_FFI_THROW(ValueError) << "there is no staging buffer";
  return Operation{read_pieces(pieces), read_groups(groups, "groups"), int64_data(pages), page_count.value,
                   Indices(slots),      page_size,                     chunk_pages,       int64_data(buffers),
                   buffer_count.value,  cursor,                        int64_data(boundaries), boundary_count.value};
}

// Device rows to host pages, all layers. Returns the number of copies.
inline int64_t write_back_entry(tvm::ffi::TensorView pieces, tvm::ffi::TensorView groups, tvm::ffi::TensorView pages,
                                tvm::ffi::TensorView slots, tvm::ffi::TensorView buffers, tvm::ffi::TensorView boundaries,
                                int64_t page_size, int64_t chunk_pages, int64_t cursor, int64_t blocks, int64_t threads,
                                int64_t stream, int64_t copy_stream) {
  const Operation op =
      read_operation(pieces, groups, pages, slots, buffers, boundaries, page_size, chunk_pages, cursor);
  Backend backend(blocks, threads, stream, copy_stream);
  std::vector<Copy> copies;
  int64_t total = 0;
  std::vector<Group> moved = op.groups;
  for (int64_t chunk = 0, first = 0; first < op.page_count; ++chunk) {
    const int64_t* buffer = op.buffers + 3 * ((op.cursor + chunk) % op.buffer_count);
    const int64_t count = std::min(chunk == 0 ? op.first_chunk() : op.chunk_pages, op.page_count - first);
    for (size_t g = 0; g < moved.size(); ++g) moved[g].destination.base = op.groups[g].destination.base + buffer[0];
    backend.rows_wait(buffer[2]);
    backend.move(moved, count * op.page_size, op.slots.from(first * op.page_size), Indices());
    backend.rows_record(buffer[1]);
    backend.copies_wait(buffer[1]);
    op.plan(first, count, 0, static_cast<uint64_t>(buffer[0]), copies);
    backend.copy(copies, true);
    backend.copies_record(buffer[2]);
    total += static_cast<int64_t>(copies.size());
    first += count;
  }
  return total;
}

// Either direction without staging, layers [first_layer, end_layer) in order, or -1 with nothing queued where the copies
// would not be at least least_bytes long on average and least_width wide. lines: int64 [layers * lines a layer, 6], the
// fields of RowLine. slots: device slots in CPU memory. fence: an event that makes the copies wait for the caller's stream.
// layer_events: int64 [layers or 0], recorded on the copy stream after each layer. Returns the number of copies.
inline int64_t copy_runs_entry(tvm::ffi::TensorView lines, tvm::ffi::TensorView pages, tvm::ffi::TensorView slots,
                               tvm::ffi::TensorView boundaries, int64_t page_size, int64_t lines_per_layer,
                               int64_t first_layer, int64_t end_layer, tvm::ffi::TensorView layer_events, bool to_host,
                               int64_t least_bytes, int64_t least_width, int64_t fence, int64_t stream,
                               int64_t copy_stream) {
  Symbol line_count{"lines"}, six{"fields of a line", kLineFields}, page_count{"pages"}, slot_count{"slots"};
  Symbol boundary_count{"boundaries"}, event_count{"layer events"};
  TensorCheck(lines, "lines").on_cpu().integers({64}).shape({&line_count, &six});
  TensorCheck(pages, "host pages").on_cpu().integers({64}).shape({&page_count});
  slot_count.value = page_count.value * page_size;
  TensorCheck(slots, "device_indices").on_cpu().integers({32, 64}).shape({&slot_count});
  TensorCheck(boundaries, "boundaries").on_cpu().integers({64}).shape({&boundary_count});
  TensorCheck(layer_events, "layer_events").on_cpu().integers({64}).shape({&event_count});
  if (first_layer < 0 || end_layer * lines_per_layer > line_count.value) {
    TVM_FFI_THROW(ValueError) << "layers " << first_layer << " to " << end_layer << " of " << line_count.value << " lines";
  }
  const std::vector<JointRun> runs = joint_runs(int64_data(pages), page_count.value, slots, page_size);
  int64_t slot_bytes = 0;
  for (int64_t i = 0; i < lines_per_layer; ++i) slot_bytes += int64_data(lines)[i * kLineFields + 2];
  const int64_t fewest = lines_per_layer * static_cast<int64_t>(runs.size());
  if (runs.empty() || slot_bytes * slot_count.value / fewest < least_bytes) return -1;
  auto plan = [&](int64_t layer, std::vector<Copy>& copies) {
    copies.clear();
    for (int64_t i = layer * lines_per_layer; i < (layer + 1) * lines_per_layer; ++i) {
      const int64_t* f = int64_data(lines) + i * kLineFields;
      const RowLine line{static_cast<uint64_t>(f[0]), static_cast<uint64_t>(f[1]), f[2], f[3], f[4], f[5]};
      for (const JointRun& run : runs) {
        append_line(line, run, page_size, int64_data(boundaries), boundary_count.value, copies);
      }
    }
  };
  std::vector<Copy> copies;
  plan(first_layer, copies);
  if (!worth_it(copies, least_bytes, least_width)) return -1;
  Backend backend(1, 1, stream, copy_stream);
  backend.rows_record(fence);
  backend.copies_wait(fence);
  int64_t total = 0;
  for (int64_t layer = first_layer; layer < end_layer; ++layer) {
    plan(layer, copies);
    backend.copy(copies, to_host);
    if (layer - first_layer < event_count.value) backend.copies_record(int64_data(layer_events)[layer - first_layer]);
    total += static_cast<int64_t>(copies.size());
  }
  return total;
}

// The copies that an operation of one chunk would make, for tests and for those who want to see them: copies receives
// int64 [rows, 6] (the fields of Copy; staging addresses count from 0), as many as fit. Returns how many there are.
inline int64_t plan_copies_entry(tvm::ffi::TensorView pieces, tvm::ffi::TensorView pages, tvm::ffi::TensorView boundaries,
                                 int64_t layer, tvm::ffi::TensorView copies) {
  Symbol page_count{"pages"}, boundary_count{"boundaries"}, rows{"rows"}, six{"fields of a copy", 6};
  TensorCheck(pages, "host pages").on_cpu().integers({64}).shape({&page_count});
  TensorCheck(boundaries, "boundaries").on_cpu().integers({64}).shape({&boundary_count});
  TensorCheck(copies, "copies").on_cpu().integers({64}).shape({&rows, &six});
  Operation op{};
  op.pieces = read_pieces(pieces);
  op.pages = int64_data(pages);
  op.boundaries = int64_data(boundaries);
  op.boundary_count = boundary_count.value;
  std::vector<Copy> planned;
  op.plan(0, page_count.value, layer, 0, planned);
  int64_t* out = static_cast<int64_t*>(copies.data_ptr());
  for (size_t i = 0; i < planned.size() && static_cast<int64_t>(i) < rows.value; ++i, out += 6) {
    const Copy& copy = planned[i];
    const int64_t fields[6] = {static_cast<int64_t>(copy.host), static_cast<int64_t>(copy.staging), copy.width,
                               copy.height,                     copy.host_pitch,                    copy.staging_pitch};
    std::copy(fields, fields + 6, out);
  }
  return static_cast<int64_t>(planned.size());
}

// Host pages to device rows, layers [first_layer, end_layer) in order, layers_each at a time: pieces and groups are those
// of the first layers_each layers, and the groups' source is staging memory. events: int64 [layers / layers_each or 0],
// recorded on the caller's stream after the rows of each layers_each layers. fence: an event that makes the copies wait for
// the caller's stream; 0 where they need not wait. Returns the number of copies.
inline int64_t load_entry(tvm::ffi::TensorView pieces, tvm::ffi::TensorView groups, tvm::ffi::TensorView pages,
                          tvm::ffi::TensorView slots, tvm::ffi::TensorView buffers, tvm::ffi::TensorView boundaries,
                          int64_t page_size, int64_t chunk_pages, int64_t cursor, int64_t first_layer, int64_t end_layer,
                          int64_t layers_each, tvm::ffi::TensorView events, int64_t fence, int64_t blocks,
                          int64_t threads, int64_t stream, int64_t copy_stream) {
  Symbol event_count{"events"};
  TensorCheck(events, "events").on_cpu().integers({64}).shape({&event_count});
  if (layers_each < 1 || (end_layer - first_layer) % layers_each != 0) {
    TVM_FFI_THROW(ValueError) << "layers_each is " << layers_each << "; it must divide the " << end_layer - first_layer
                              << " layers";
  }
  const Operation op =
      read_operation(pieces, groups, pages, slots, buffers, boundaries, page_size, chunk_pages, cursor);
  Backend backend(blocks, threads, stream, copy_stream);
  if (fence != 0) {
    backend.rows_record(fence);
    backend.copies_wait(fence);
  }
  std::vector<Copy> copies;
  int64_t total = 0, used = op.cursor;
  std::vector<Group> moved = op.groups;
  for (int64_t layer = first_layer; layer < end_layer; layer += layers_each) {
    for (int64_t chunk = 0; chunk < op.chunks(); ++chunk, ++used) {
      const int64_t* buffer = op.buffers + 3 * (used % op.buffer_count);
      const int64_t first = chunk * op.chunk_pages;
      const int64_t count = std::min(op.chunk_pages, op.page_count - first);
      backend.copies_wait(buffer[2]);
      op.plan(first, count, layer, static_cast<uint64_t>(buffer[0]), copies);
      backend.copy(copies, false);
      backend.copies_record(buffer[1]);
      backend.rows_wait(buffer[1]);
      for (size_t g = 0; g < moved.size(); ++g) {
        moved[g].source.base = op.groups[g].source.base + buffer[0];
        moved[g].destination.bases = op.groups[g].destination.bases + layer * (op.groups[g].rows / layers_each);
      }
      backend.move(moved, count * op.page_size, Indices(), op.slots.from(first * op.page_size));
      backend.rows_record(buffer[2]);
      total += static_cast<int64_t>(copies.size());
    }
    const int64_t step = (layer - first_layer) / layers_each;
    if (step < event_count.value) backend.rows_record(int64_data(events)[step]);
  }
  return total;
}

}  // namespace hicache

TVM_FFI_DLL_EXPORT_TYPED_FUNC(write_back, hicache::write_back_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, hicache::load_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_runs, hicache::copy_runs_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_copies, hicache::plan_copies_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scan_indices, hicache::scan_indices_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(upload_indices, hicache::upload_indices_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(create_stream, hicache::create_stream_entry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(device_address, hicache::device_address_entry);
