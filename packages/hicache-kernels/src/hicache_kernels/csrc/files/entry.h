// Entry point of the files module: many small files read in one call, with nothing of Python in between.
#pragma once

#include <hicache/checks.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "read_file.h"
#include "run_in_threads.h"

namespace hicache {

constexpr int64_t kPieceFields = 3;
constexpr int64_t kFoundFields = 8;
constexpr int64_t kFunctions = 5;

inline std::vector<const char*> split_paths(const tvm::ffi::Bytes& paths, int64_t count) {
  std::vector<const char*> list;
  const char* const end = paths.data() + paths.size();
  for (const char* at = paths.data(); at < end; at += std::strlen(at) + 1) list.push_back(at);
  if (static_cast<int64_t>(list.size()) != count) {
    TVM_FFI_THROW(ValueError) << "paths has " << list.size() << " entries; it must have " << count;
  }
  return list;
}

// Where bytes go, in the order of the files. starts: where the pieces of each file begin, and the end.
inline std::vector<iovec> read_pieces(const int64_t* pieces, int64_t count, std::vector<size_t>& starts) {
  const int64_t files = static_cast<int64_t>(starts.size()) - 1;
  std::vector<iovec> list;
  list.reserve(static_cast<size_t>(count));
  int64_t last = 0;
  for (const int64_t* piece = pieces; piece < pieces + count * kPieceFields; piece += kPieceFields) {
    if (piece[0] < last || piece[0] >= files) {
      TVM_FFI_THROW(ValueError) << "pieces[" << list.size() << "] is of file " << piece[0] << "; it must be " << last
                                << " to " << files - 1;
    }
    if (piece[2] < 0) {
      TVM_FFI_THROW(ValueError) << "pieces[" << list.size() << "] has " << piece[2] << " bytes; it must have 0 or more";
    }
    while (last < piece[0]) starts[static_cast<size_t>(++last)] = list.size();
    list.push_back(iovec{reinterpret_cast<void*>(piece[1]), static_cast<size_t>(piece[2])});
  }
  while (last < files) starts[static_cast<size_t>(++last)] = list.size();
  return list;
}

inline ChecksumFunctions checksum_functions(const int64_t* addresses) {
  ChecksumFunctions functions{};
  static_assert(sizeof(functions) == kFunctions * sizeof(int64_t), "an address a function");
  int64_t given = 0;
  for (int64_t i = 0; i < kFunctions; ++i) given += addresses[i] != 0;
  if (given != 0 && given != kFunctions) {
    TVM_FFI_THROW(ValueError) << "checksum has " << given << " functions; it must have 0 or " << kFunctions;
  }
  std::memcpy(&functions, addresses, sizeof(functions));
  return functions;
}

// paths: one a file, each ended by a zero. pieces: int64 [pieces, 3] in CPU memory: file (in rising order), address and
// bytes of the places that its bytes go to, one after the other. checksum: int64 [5] in CPU memory, addresses of
// functions, or zeros; `unchecked` bytes at the end of each file are not summed up. found: int64 [files, 8] in CPU memory,
// written to: errno or 0, bytes read, mode, owner, size, time of the last change in ns, lower and higher half of the sum.
inline void read_files_entry(const tvm::ffi::Bytes& paths, tvm::ffi::TensorView pieces, tvm::ffi::TensorView checksum,
                             int64_t unchecked, int64_t threads, tvm::ffi::TensorView found) {
  Symbol files{"files"}, places{"pieces"}, piece_fields{"fields", kPieceFields}, found_fields{"fields", kFoundFields};
  Symbol functions{"functions", kFunctions};
  TensorCheck(pieces, "pieces").on_cpu().integers({64}).shape({&places, &piece_fields});
  TensorCheck(checksum, "checksum").on_cpu().integers({64}).shape({&functions});
  TensorCheck(found, "found").on_cpu().integers({64}).shape({&files, &found_fields});
  if (unchecked < 0) TVM_FFI_THROW(ValueError) << "unchecked is " << unchecked << "; it must be 0 or more";
  if (threads < 1) TVM_FFI_THROW(ValueError) << "threads is " << threads << "; it must be 1 or more";
  const std::vector<const char*> names = split_paths(paths, files.value);
  std::vector<size_t> starts(names.size() + 1, 0);
  const std::vector<iovec> list = read_pieces(int64_data(pieces), places.value, starts);
  const ChecksumFunctions sum = checksum_functions(int64_data(checksum));
  std::vector<FileReader> readers;
  readers.reserve(std::min(static_cast<size_t>(threads), names.size()));
  while (readers.size() < readers.capacity()) readers.emplace_back(sum);
  int64_t* rows = const_cast<int64_t*>(int64_data(found));
  std::atomic<size_t> next{0};  // who is done takes the next, however the system divides its CPUs
  run_in_threads(readers.size(), [&](size_t reader) noexcept {
    for (size_t i = next++; i < names.size(); i = next++) {
      const FoundFile file = readers[reader].read(names[i], list.data() + starts[i], starts[i + 1] - starts[i],
                                                  static_cast<size_t>(unchecked));
      const int64_t fields[kFoundFields] = {file.error, file.bytes, file.mode,       file.owner,
                                            file.size,  file.changed_ns, static_cast<int64_t>(file.digest.low),
                                            static_cast<int64_t>(file.digest.high)};
      std::memcpy(rows + static_cast<int64_t>(i) * kFoundFields, fields, sizeof(fields));
    }
  });
}

}  // namespace hicache

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_files, hicache::read_files_entry);
