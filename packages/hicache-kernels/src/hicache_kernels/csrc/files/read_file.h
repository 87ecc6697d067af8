// Reads one file into pieces of memory, if it is as long as they are.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace hicache {

struct FoundFile {
  int error;  // errno of what failed, or 0
  int64_t bytes;
  int64_t mode;
  int64_t owner;
  int64_t size;
  int64_t changed_ns;
};

// Most pieces that Linux takes in one call.
constexpr size_t kMostPieces = 1024;

// A short first read makes the kernel read ahead from a disk: in large folios and while it copies. One long read of the
// whole file does neither, and costs twice the CPU time.
constexpr size_t kFirstRead = 4 << 10;
constexpr int64_t kReadAheadFrom = 64 << 10;

// Reads from the start until the pieces are full, the file ends or reading fails; changes the pieces.
inline int fill(int descriptor, iovec* pieces, size_t count, int64_t size, int64_t& bytes) {
  if (size >= kReadAheadFrom && pieces->iov_len > kFirstRead) {
    ssize_t moved;
    do {
      moved = pread(descriptor, pieces->iov_base, kFirstRead, 0);
    } while (moved < 0 && errno == EINTR);
    if (moved <= 0) return moved < 0 ? errno : 0;
    bytes = moved;
    pieces->iov_base = static_cast<char*>(pieces->iov_base) + moved;
    pieces->iov_len -= static_cast<size_t>(moved);
  }
  while (count > 0) {
    if (pieces->iov_len == 0) {
      ++pieces;
      --count;
      continue;
    }
    const ssize_t moved = preadv(descriptor, pieces, static_cast<int>(std::min(count, kMostPieces)), bytes);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return moved < 0 ? errno : 0;
    bytes += moved;
    for (size_t left = static_cast<size_t>(moved); left > 0;) {
      const size_t part = std::min(left, pieces->iov_len);
      pieces->iov_base = static_cast<char*>(pieces->iov_base) + part;
      pieces->iov_len -= part;
      left -= part;
      if (pieces->iov_len == 0) {
        ++pieces;
        --count;
      }
    }
  }
  return 0;
}

// Reads a regular file whose size is that of the pieces; of any other it only tells what it is.
inline FoundFile read_file(const char* path, iovec* pieces, size_t count) {
  FoundFile found{};
  int descriptor;
  do {
    // Not blocking: of what is no regular file, a pipe would hold the call until somebody writes.
    descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) {
    found.error = errno;
    return found;
  }
  struct stat status;
  if (fstat(descriptor, &status) < 0) {
    found.error = errno;
  } else {
    found.mode = status.st_mode;
    found.owner = status.st_uid;
    found.size = status.st_size;
    found.changed_ns = static_cast<int64_t>(status.st_mtim.tv_sec) * 1000000000 + status.st_mtim.tv_nsec;
    int64_t room = 0;
    for (size_t i = 0; i < count; ++i) room += static_cast<int64_t>(pieces[i].iov_len);
    if (S_ISREG(status.st_mode) && found.size == room) {
      found.error = fill(descriptor, pieces, count, found.size, found.bytes);
    }
  }
  close(descriptor);
  return found;
}

}  // namespace hicache
