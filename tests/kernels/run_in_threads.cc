// Runs work in four threads while memory runs out at one allocation after the other: a line each, how much was done.
#include <run_in_threads.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

namespace {

thread_local long left = -1;  // allocations of this thread until one fails; below zero none does

}  // namespace

void* operator new(std::size_t bytes) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  void* memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
  for (long fails = 1; fails <= 5; ++fails) {  // the first one, of the list of threads, is before any work
    std::atomic<int> next{0}, done{0};
    left = fails;
    hicache::run_in_threads(4, [&](size_t) noexcept {
      while (next++ < 100) ++done;
    });
    std::printf("%d %s\n", done.load(), left < 0 ? "failed" : "all");
    left = -1;
  }
}
