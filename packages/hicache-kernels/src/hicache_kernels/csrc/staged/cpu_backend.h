// What the staged module asks of a device, on the CPU: everything happens at once, in the caller's thread.
#pragma once

#include <hicache/rows.h>

#include "copies.h"

namespace hicache {

class Backend {
 public:
  Backend(int64_t, int64_t, int64_t, int64_t) {}

  void rows_wait(int64_t) {}
  void rows_record(int64_t) {}
  void copies_wait(int64_t) {}
  void copies_record(int64_t) {}

  void move(const std::vector<Group>& groups, int64_t slots, const Indices& source, const Indices& destination) {
    move_rows(groups, slots, source, destination);
  }

  void copy(const std::vector<Copy>& copies, bool to_host) {
    for (const Copy& copy : copies) {
      for (int64_t row = 0; row < copy.height; ++row) {
        void* host = reinterpret_cast<void*>(copy.host + row * copy.host_pitch);
        void* staging = reinterpret_cast<void*>(copy.staging + row * copy.staging_pitch);
        std::memcpy(to_host ? host : staging, to_host ? staging : host, copy.width);
      }
    }
  }
};

}  // namespace hicache
