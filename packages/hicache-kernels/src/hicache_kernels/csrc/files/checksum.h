// A checksum of 128 bits whose functions come compiled from elsewhere: they come as addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace hicache {

struct Digest {
  uint64_t low;
  uint64_t high;
};

struct ChecksumFunctions {
  void* (*create)();
  int (*reset)(void* state);
  int (*update)(void* state, const void* data, size_t bytes);
  Digest (*digest)(const void* state);
  int (*release)(void* state);
};

// One state, for one thread; it does nothing where there are no functions.
class Checksum {
 public:
  explicit Checksum(const ChecksumFunctions& functions) : functions_(functions) {
    if (functions_.create == nullptr) return;
    state_ = functions_.create();
    if (state_ == nullptr) throw std::bad_alloc();
  }
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  ~Checksum() {
    if (state_ != nullptr) functions_.release(state_);
  }

  void reset() {
    if (state_ != nullptr) functions_.reset(state_);
  }
  void update(const void* data, size_t bytes) {
    if (state_ != nullptr) functions_.update(state_, data, bytes);
  }
  Digest digest() const { return state_ != nullptr ? functions_.digest(state_) : Digest{0, 0}; }

 private:
  ChecksumFunctions functions_;
  void* state_ = nullptr;
};

}  // namespace hicache
