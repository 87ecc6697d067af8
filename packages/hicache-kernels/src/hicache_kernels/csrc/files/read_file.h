// Reads one file into pieces of memory, if it is as long as they are, and sums it up while it is in the CPU's cache.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "checksum.h"

namespace hicache {

struct FoundFile {
  int error;  // errno of what failed, or 0
  int64_t bytes;
  int64_t mode;
  int64_t owner;
  int64_t size;
  int64_t changed_ns;
  Digest digest;
};

// Most pieces that Linux takes in one call.
constexpr size_t kMostPieces = 1024;

// What is read at once is still in the cache when it is summed up.
constexpr size_t kStep = 256 << 10;

// A short first read makes the kernel read ahead from a disk: in large folios and while it copies. One long read of the
// whole file does neither, and costs twice the CPU time.
constexpr size_t kFirstStep = 4 << 10;
constexpr size_t kReadAheadFrom = 64 << 10;

// Reads files one after the other; has the memory for it from the start, so that reading cannot throw.
class FileReader {
 public:
  explicit FileReader(const ChecksumFunctions& functions) : checksum_(std::make_unique<Checksum>(functions)) {
    step_.reserve(kMostPieces);
  }

  // Reads a regular file whose size is that of the pieces; of any other it only tells what it is. The digest leaves the
  // last `unchecked` bytes out.
  FoundFile read(const char* path, const iovec* pieces, size_t count, size_t unchecked) noexcept {
    FoundFile found{};
    int descriptor;
    do {
      // Not blocking: of what is no regular file, a pipe would hold the call until something is written.
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
      size_t room = 0;
      for (size_t i = 0; i < count; ++i) room += pieces[i].iov_len;
      if (S_ISREG(status.st_mode) && static_cast<size_t>(found.size) == room) {
        found.error = fill(descriptor, pieces, pieces + count, room, room - std::min(room, unchecked), found.bytes);
        found.digest = checksum_->digest();
      }
    }
    close(descriptor);
    return found;
  }

 private:
  // Reads from the start until the pieces are full, the file ends or reading fails.
  int fill(int descriptor, const iovec* piece, const iovec* end, size_t size, size_t checked, int64_t& bytes) noexcept {
    checksum_->reset();
    size_t used = 0;  // bytes of the first piece that are read
    size_t most = size >= kReadAheadFrom ? kFirstStep : kStep;
    while (true) {
      step_.clear();
      size_t wanted = 0;
      while (piece < end && wanted < most && step_.size() < kMostPieces) {
        const size_t part = std::min(piece->iov_len - used, most - wanted);
        if (part > 0) step_.push_back(iovec{static_cast<char*>(piece->iov_base) + used, part});
        wanted += part;
        used += part;
        if (used == piece->iov_len) {
          ++piece;
          used = 0;
        }
      }
      if (wanted == 0) return 0;
      const int64_t before = bytes;
      const int error = read_step(descriptor, bytes, checked);
      if (error != 0 || static_cast<size_t>(bytes - before) < wanted) return error;
      most = kStep;
    }
  }

  // Fills the pieces of a step, and sums up what comes as long as it is to be checked.
  int read_step(int descriptor, int64_t& bytes, size_t& checked) noexcept {
    for (size_t first = 0; first < step_.size();) {
      const ssize_t moved = preadv(descriptor, &step_[first], static_cast<int>(step_.size() - first), bytes);
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return moved < 0 ? errno : 0;
      bytes += moved;
      for (size_t left = static_cast<size_t>(moved); left > 0;) {
        iovec& piece = step_[first];
        const size_t part = std::min(left, piece.iov_len), summed = std::min(part, checked);
        if (summed > 0) checksum_->update(piece.iov_base, summed);
        checked -= summed;
        left -= part;
        piece.iov_base = static_cast<char*>(piece.iov_base) + part;
        piece.iov_len -= part;
        if (piece.iov_len == 0) ++first;
      }
    }
    return 0;
  }

  std::unique_ptr<Checksum> checksum_;
  std::vector<iovec> step_;
};

}  // namespace hicache
