// Runs the same work in several threads that end with the call.
#pragma once

#include <cstddef>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace hicache {

// Runs the work in so many threads, or in fewer where the system gives no more. Of several none is the caller's, which
// waits: Linux puts new threads on idle CPUs, but leaves one for long on the CPU of a caller that goes on working.
template <typename Work>
void run_in_threads(size_t count, const Work& work) {
  std::vector<std::thread> threads;
  threads.reserve(count);
  try {
    for (size_t i = 0; count > 1 && i < count; ++i) threads.emplace_back(work, i);
  } catch (const std::system_error&) {
  } catch (const std::bad_alloc&) {
  }
  if (threads.empty()) work(0);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hicache
