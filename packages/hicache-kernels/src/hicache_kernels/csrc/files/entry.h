// Entry point of the files module: many small files read in one call, with nothing of Python in between.
#pragma once

#include <hicache/checks.h>

#include <cstring>
#include <vector>

#include "read_file.h"

namespace hicache {

constexpr int64_t kPieceFields = 3;
constexpr int64_t kFoundFields = 6;

inline std::vector<const char*> split_paths(const tvm::ffi::Bytes& paths, int64_t count) {
  std::vector<const char*> list;
  const char* const end = paths.data() + paths.size();
  for (const char* at = paths.data(); at < end; at += std::strlen(at) + 1) list.push_back(at);
  if (static_cast<int64_t>(list.size()) != count) {
    TVM_FFI_THROW(ValueError) << "paths has " << list.size() << " entries; it must have " << count;
  }
  return list;
}

// Where bytes go, in the order of the files.
inline std::vector<iovec> read_pieces(const int64_t* pieces, int64_t count, std::vector<size_t>& of_file) {
  std::vector<iovec> list;
  list.reserve(static_cast<size_t>(count));
  int64_t last = 0;
  for (const int64_t* piece = pieces; piece < pieces + count * kPieceFields; piece += kPieceFields) {
    if (piece[0] < last || piece[0] >= static_cast<int64_t>(of_file.size())) {
      TVM_FFI_THROW(ValueError) << "pieces[" << list.size() << "] is of file " << piece[0] << "; it must be " << last
                                << " to " << static_cast<int64_t>(of_file.size()) - 1;
    }
    if (piece[2] < 0) {
      TVM_FFI_THROW(ValueError) << "pieces[" << list.size() << "] has " << piece[2] << " bytes; it must have 0 or more";
    }
    last = piece[0];
    ++of_file[static_cast<size_t>(last)];
    list.push_back(iovec{reinterpret_cast<void*>(piece[1]), static_cast<size_t>(piece[2])});
  }
  return list;
}

// paths: one a file, each ended by a zero. pieces: int64 [pieces, 3] in CPU memory: file (in rising order), address and
// bytes of the places that its bytes go to, one behind the other. found: int64 [files, 6] in CPU memory, written to:
// errno or 0, bytes read, mode, owner, size, time of the last change in ns.
inline void read_files_entry(const tvm::ffi::Bytes& paths, tvm::ffi::TensorView pieces, tvm::ffi::TensorView found) {
  Symbol files{"files"}, places{"pieces"}, piece_fields{"fields", kPieceFields}, found_fields{"fields", kFoundFields};
  TensorCheck(pieces, "pieces").on_cpu().integers({64}).shape({&places, &piece_fields});
  TensorCheck(found, "found").on_cpu().integers({64}).shape({&files, &found_fields});
  const std::vector<const char*> names = split_paths(paths, files.value);
  std::vector<size_t> counts(names.size(), 0);
  std::vector<iovec> list = read_pieces(int64_data(pieces), places.value, counts);
  int64_t* row = const_cast<int64_t*>(int64_data(found));
  iovec* piece = list.data();
  for (size_t i = 0; i < names.size(); ++i) {
    const FoundFile file = read_file(names[i], piece, counts[i]);
    const int64_t fields[kFoundFields] = {file.error, file.bytes, file.mode, file.owner, file.size, file.changed_ns};
    std::memcpy(row, fields, sizeof(fields));
    row += kFoundFields;
    piece += counts[i];
  }
}

}  // namespace hicache

TVM_FFI_DLL_EXPORT_TYPED_FUNC(read_files, hicache::read_files_entry);
