// Plans the copies between host pages and staging memory: as few and as large as the strides of both sides allow.
#pragma once

#include <hicache/checks.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace hicache {

struct Axis {
  int64_t count;
  int64_t host_stride;
  int64_t staging_stride;
};

// The axes of a lattice, in place: a vector would take memory for every run of every copy.
class Axes {
 public:
  Axes(std::initializer_list<Axis> axes) {
    for (const Axis& axis : axes) {
      if (axis.count != 1) axes_[size_++] = axis;
    }
  }

  Axis* begin() { return axes_; }
  Axis* end() { return axes_ + size_; }
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  Axis& operator[](size_t i) { return axes_[i]; }
  Axis& front() { return axes_[0]; }
  Axis& back() { return axes_[size_ - 1]; }
  void pop_back() { --size_; }
  void erase(size_t at) {
    std::copy(begin() + at + 1, end(), begin() + at);
    --size_;
  }

 private:
  Axis axes_[3];
  size_t size_ = 0;
};

// `width` contiguous bytes, repeated along the axes.
struct Lattice {
  uint64_t host;
  uint64_t staging;
  int64_t width;
  Axes axes;
};

// One copy of `height` rows of `width` bytes; height 1 is a plain copy.
struct Copy {
  uint64_t host;
  uint64_t staging;
  int64_t width;
  int64_t height;
  int64_t host_pitch;
  int64_t staging_pitch;
};

// A contiguous stretch of a page and where the same bytes lie in staging memory; pieces.py makes them.
struct Piece {
  uint64_t host;          // address of the stretch in page 0 (and layer 0 of a load)
  int64_t page_stride;    // on the host
  int64_t layer_stride;   // on the host, from one layer's piece to the next (load only)
  int64_t width;
  int64_t staging;        // offset in a staging buffer
  int64_t staging_page;   // stride of pages in staging memory
  Axis axes[2];           // more axes; count 1 where there is none
};

// Largest pitch of a 2-D copy that the runtimes accept.
constexpr int64_t kMaxPitch = (int64_t{1} << 31) - 1;

constexpr int64_t kPieceFields = 12;

inline std::vector<Piece> read_pieces(const tvm::ffi::TensorView& pieces) {
  Symbol count{"pieces"}, fields{"fields of a piece", kPieceFields};
  TensorCheck(pieces, "pieces").on_cpu().integers({64}).shape({&count, &fields});
  std::vector<Piece> result;
  const int64_t* f = int64_data(pieces);
  for (int64_t p = 0; p < count.value; ++p, f += kPieceFields) {
    result.push_back(Piece{static_cast<uint64_t>(f[0]), f[1], f[2], f[3], f[4], f[5],
                           {Axis{f[6], f[7], f[8]}, Axis{f[9], f[10], f[11]}}});
  }
  return result;
}

// Joins axes that continue each other on both sides, outermost first.
inline void simplify(Lattice& lattice) {
  Axes& axes = lattice.axes;
  for (size_t i = axes.size(); i-- > 0;) {
    if (axes[i].count == 1) axes.erase(i);
  }
  for (size_t i = 1; i < axes.size(); ++i) {
    for (size_t j = i; j > 0 && axes[j].host_stride > axes[j - 1].host_stride; --j) std::swap(axes[j], axes[j - 1]);
  }
  while (!axes.empty() && axes.back().host_stride == lattice.width && axes.back().staging_stride == lattice.width) {
    lattice.width *= axes.back().count;
    axes.pop_back();
  }
  for (size_t i = 0; i + 1 < axes.size();) {
    const Axis inner = axes[i + 1];
    if (axes[i].host_stride == inner.count * inner.host_stride &&
        axes[i].staging_stride == inner.count * inner.staging_stride) {
      axes[i] = Axis{axes[i].count * inner.count, inner.host_stride, inner.staging_stride};
      axes.erase(i + 1);
    } else {
      ++i;
    }
  }
}

// Appends the copies of a lattice. `boundaries` are host addresses, ascending, that no copy may span. What lies after a
// boundary is the next turn of the loop, not a deeper call: a long run may meet any number of them.
inline void append_copies(Lattice lattice, const int64_t* boundaries, int64_t boundary_count, std::vector<Copy>& copies) {
  for (;;) {
    simplify(lattice);
    int64_t extent = lattice.width;
    for (const Axis& axis : lattice.axes) extent += (axis.count - 1) * axis.host_stride;
    const int64_t start = static_cast<int64_t>(lattice.host);
    const int64_t* found = std::upper_bound(boundaries, boundaries + boundary_count, start);
    if (found == boundaries + boundary_count || *found >= start + extent) break;
    const int64_t before = *found - start;  // bytes of the extent in front of the boundary
    if (lattice.axes.empty()) {
      copies.push_back(Copy{lattice.host, lattice.staging, before, 1, before, before});
      lattice.host += before;
      lattice.staging += before;
      lattice.width -= before;
      continue;
    }
    const Axis outer = lattice.axes.front();
    const int64_t one = extent - (outer.count - 1) * outer.host_stride;
    const int64_t whole = before >= one ? std::min(outer.count, (before - one) / outer.host_stride + 1) : 0;
    const int64_t touching = std::min(outer.count, (before + outer.host_stride - 1) / outer.host_stride);
    auto part = [&](int64_t first, int64_t count) {
      Lattice piece = lattice;
      piece.host += first * outer.host_stride;
      piece.staging += first * outer.staging_stride;
      piece.axes.front().count = count;
      return piece;
    };
    if (whole > 0) append_copies(part(0, whole), boundaries, boundary_count, copies);
    for (int64_t i = whole; i < touching; ++i) append_copies(part(i, 1), boundaries, boundary_count, copies);
    if (touching == outer.count) return;
    lattice = part(touching, outer.count - touching);
  }
  const bool pitch_fits = lattice.axes.empty() || (lattice.axes.front().host_stride <= kMaxPitch &&
                                                   lattice.axes.front().staging_stride <= kMaxPitch);
  if (lattice.axes.size() <= 1 && pitch_fits) {
    const Axis axis = lattice.axes.empty() ? Axis{1, lattice.width, lattice.width} : lattice.axes.front();
    copies.push_back(Copy{lattice.host, lattice.staging, lattice.width, axis.count, axis.host_stride, axis.staging_stride});
    return;
  }
  // A copy has one pitch, of limited size: the axis with the fewest steps becomes a loop.
  size_t shortest = 0;
  for (size_t i = 1; i < lattice.axes.size(); ++i) {
    if (lattice.axes[i].count < lattice.axes[shortest].count) shortest = i;
  }
  const Axis looped = lattice.axes[shortest];
  lattice.axes.erase(shortest);
  for (int64_t i = 0; i < looped.count; ++i) {
    Lattice piece = lattice;
    piece.host += i * looped.host_stride;
    piece.staging += i * looped.staging_stride;
    append_copies(piece, boundaries, boundary_count, copies);
  }
}

// Copies of `count` pages, neighbours from host page `page` on, that lie from page `position` of a staging buffer on.
inline void append_run(const Piece& piece, uint64_t staging, int64_t page, int64_t position, int64_t count, int64_t layer,
                       const int64_t* boundaries, int64_t boundary_count, std::vector<Copy>& copies) {
  Lattice lattice{piece.host + static_cast<uint64_t>(page * piece.page_stride + layer * piece.layer_stride),
                  staging + static_cast<uint64_t>(piece.staging + position * piece.staging_page),
                  piece.width,
                  {Axis{count, piece.page_stride, piece.staging_page}, piece.axes[0], piece.axes[1]}};
  append_copies(lattice, boundaries, boundary_count, copies);
}

}  // namespace hicache
