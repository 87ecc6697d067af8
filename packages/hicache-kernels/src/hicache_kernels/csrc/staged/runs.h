// Copies without staging: where device slots are neighbours wherever host pages are, 2-D copies need no row kernel.
#pragma once

#include <hicache/indices.h>
#include <hicache/rows.h>

#include "copies.h"

namespace hicache {

// One row of every slot: where it lies on both sides.
struct RowLine {
  uint64_t device;  // slot 0
  uint64_t host;    // page 0, slot 0
  int64_t row_bytes;
  int64_t device_slot;  // bytes from slot to slot on the device
  int64_t host_slot;
  int64_t host_page;
};

constexpr int64_t kLineFields = 6;

struct JointRun {
  int64_t page;
  int64_t slot;
  int64_t pages;
};

// Runs that are neighbours on both sides; empty where a page's device slots are not neighbours.
inline std::vector<JointRun> joint_runs(const int64_t* pages, int64_t page_count, const tvm::ffi::TensorView& slots,
                                        int64_t page_size) {
  std::vector<JointRun> runs;
  for (int64_t i = 0; i < page_count; ++i) {
    const int64_t slot = index_at(slots, i * page_size);
    for (int64_t s = 1; s < page_size; ++s) {
      if (index_at(slots, i * page_size + s) != slot + s) return {};
    }
    if (!runs.empty() && pages[i] == runs.back().page + runs.back().pages &&
        slot == runs.back().slot + runs.back().pages * page_size) {
      ++runs.back().pages;
    } else {
      runs.push_back(JointRun{pages[i], slot, 1});
    }
  }
  return runs;
}

inline void append_line(const RowLine& line, const JointRun& run, int64_t page_size, const int64_t* boundaries,
                        int64_t boundary_count, std::vector<Copy>& copies) {
  append_copies(Lattice{line.host + static_cast<uint64_t>(run.page * line.host_page),
                        line.device + static_cast<uint64_t>(run.slot * line.device_slot),
                        line.row_bytes,
                        {Axis{run.pages, line.host_page, page_size * line.device_slot},
                         Axis{page_size, line.host_slot, line.device_slot}}},
                boundaries, boundary_count, copies);
}

// Whether the copies are few and wide enough to keep the bus as busy as staging does.
inline bool worth_it(const std::vector<Copy>& copies, int64_t least_bytes, int64_t least_width) {
  int64_t bytes = 0;
  for (const Copy& copy : copies) {
    if (copy.height > 1 && copy.width < least_width) return false;
    bytes += copy.width * copy.height;
  }
  return !copies.empty() && bytes / static_cast<int64_t>(copies.size()) >= least_bytes;
}

}  // namespace hicache
