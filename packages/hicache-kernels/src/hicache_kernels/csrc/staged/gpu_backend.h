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
    batch_.clear();
    for (const Copy& copy : copies) {
      void* host = reinterpret_cast<void*>(copy.host);
      void* staging = reinterpret_cast<void*>(copy.staging);
      void* to = to_host ? host : staging;
      void* from = to_host ? staging : host;
      if (copy.height == 1) {
        batch_.add(to, from, copy.width);
      } else {
        const int64_t to_pitch = to_host ? copy.host_pitch : copy.staging_pitch;
        const int64_t from_pitch = to_host ? copy.staging_pitch : copy.host_pitch;
        check_gpu(gpuMemcpy2DAsync(to, to_pitch, from, from_pitch, copy.width, copy.height, to_host, copy_stream_),
                  "queueing a 2-D copy");
      }
    }
    batch_.submit(to_host, copy_stream_);
  }

 private:
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
  CopyBatch batch_;
};

}  // namespace hicache
