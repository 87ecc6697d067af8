// Two symbols that libstdc++.a of newer systems takes from glibc, which has them only from 2.32 and 2.36 on.
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

// False: reference counts are atomic, whether the process has threads yet or not.
char __libc_single_threaded = 0;

// Behind std::random_device, which no module uses.
uint32_t arc4random(void) {
  uint32_t value;
  if (getrandom(&value, sizeof value, 0) != sizeof value) abort();
  return value;
}
