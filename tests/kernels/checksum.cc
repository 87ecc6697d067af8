// Adler-32 in two halves as a checksum for tests, which also counts its states and the threads that begin a sum.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace {

struct State {
  uint64_t low, high;
};

std::atomic<int> states{0}, crowd{0}, awaited{0}, round{0};
thread_local int last_round = 0;

// Holds each thread, when it first comes in a round, until so many have come.
void meet() {
  if (last_round == round) return;
  last_round = round;
  ++crowd;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (crowd < awaited && std::chrono::steady_clock::now() < end) sched_yield();
}

}  // namespace

extern "C" {
void* checksum_create() {
  ++states;
  return new State{};
}
int checksum_release(void* state) {
  --states;
  delete static_cast<State*>(state);
  return 0;
}
int checksum_reset(void* state) {
  meet();
  *static_cast<State*>(state) = State{1, 0};
  return 0;
}
int checksum_update(void* state, const void* data, size_t bytes) {
  State& sum = *static_cast<State*>(state);
  for (size_t i = 0; i < bytes; ++i) {
    sum.low = (sum.low + static_cast<const uint8_t*>(data)[i]) % 65521;
    sum.high = (sum.high + sum.low) % 65521;
  }
  return 0;
}
State checksum_digest(const void* state) { return *static_cast<const State*>(state); }

int checksum_states() { return states; }
void checksum_await(int threads) {
  crowd = 0;
  awaited = threads;
  ++round;
}
int checksum_threads() { return crowd; }
}
