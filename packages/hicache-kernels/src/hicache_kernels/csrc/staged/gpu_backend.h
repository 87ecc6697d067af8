// What the staged module asks of a device, on CUDA and ROCm: two streams, events, row kernels, copies by the copy engine.
#pragma once

#include <hicache/rows.h>

#include "batched_copy.h"
#include "copies.h"

namespace hicache {

class Backend {
 public:
  Backend(int64_t blocks, int64_t threads, int64_t stream, int64_t copy_stream)
      : blocks_(static_cast<int>(blocks)),
        threads_(static_cast<int>(threads)),
        stream_(reinterpret_cast<gpuStream_t>(stream)),
        copy_stream_(reinterpret_cast<gpuStream_t>(copy_stream)) {}

  void rows_wait(int64_t event) { wait(stream_, event); }
  void rows_record(int64_t event) { record(stream_, event); }
  void copies_wait(int64_t event) { wait(copy_stream_, event); }
  void copies_record(int64_t event) { record(copy_stream_, event); }

  void move(const std::vector<Group>& groups, int64_t slots, const Indices& source, const Indices& destination) {
    move_rows(groups, slots, source, destination, blocks_, threads_, stream_);
  }

  void copy(const std::vector<Copy>& copies, bool to_host) {
    flat_.clear();
    for (const Copy& copy : copies) {
      if (copy.height == 1 || flattens(copy)) {
        for (int64_t row = 0; row < copy.height; ++row) {
          flat_.push_back(Copy{copy.host + row * copy.host_pitch, copy.staging + row * copy.staging_pitch, copy.width, 1, 0, 0});
        }
      } else {
        submit_pitched(copy, to_host, copy_stream_);
      }
    }
    submit_flat(flat_, to_host, copy_stream_);
  }

 private:
  // A pitched copy costs the engine about 3 us on top of its bytes, a batch about 0.1 us a row but 0.5 to 1.5 us of the
  // caller's time (measured on an H200): wide rows go as a batch while those 3 us would be more than a fifteenth.
  static bool flattens(const Copy& copy) {
    return batches_copies() && copy.width >= kFlatWidth && copy.width * copy.height < kPitchedBytes;
  }
  static constexpr int64_t kFlatWidth = 64 << 10;
  static constexpr int64_t kPitchedBytes = 5 << 19;  // 2.5 MiB

  static void wait(gpuStream_t stream, int64_t event) {
    check_gpu(gpuStreamWaitEvent(stream, reinterpret_cast<gpuEvent_t>(event)), "waiting for an event");
  }
  static void record(gpuStream_t stream, int64_t event) {
    check_gpu(gpuEventRecord(reinterpret_cast<gpuEvent_t>(event), stream), "recording an event");
  }

  int blocks_;
  int threads_;
  gpuStream_t stream_;
  gpuStream_t copy_stream_;
  std::vector<Copy> flat_;
};

}  // namespace hicache
