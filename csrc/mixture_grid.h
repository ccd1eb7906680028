// Where the blocks of a mixture lie, and in which parts threads work on them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "buffer.h"
#include "codec.h"
#include "fetch.h"
#include "float_mode.h"
#include "rows.h"

namespace simd {

// Tiles of the sums, see numerics/metrics.py.
constexpr int64_t TILE_ROWS = 128, TILE_COLUMNS = 4096;

// Limits of a strip: columns, tiles, and sums of rows.
constexpr int64_t STRIP_COLUMNS = 8192, MAX_TILES = 256, STRIP_SUMS = 8192;

struct Grid {
  int64_t rows, columns, block_rows, block_columns;
  int64_t down, across;              // blocks of the matrix
  int64_t tiles_down, tiles_across;  // tiles of a block
  int64_t bands, strips;             // rows of strips, and strips in each
  int64_t strip_blocks;              // blocks of a strip

  template <class Matrix>  // subulp_mixture or subulp_blocks
  explicit Grid(const Matrix& m)
      : rows(m.rows), columns(m.columns), block_rows(m.block_rows), block_columns(m.block_columns) {
    down = parts(rows, block_rows);
    across = parts(columns, block_columns);
    tiles_down = parts(block_rows, TILE_ROWS);
    tiles_across = parts(block_columns, TILE_COLUMNS);
    bands = down * tiles_down;
    // Rows of memory that are long, and sums that fit a fast cache: of as many rows as are halved.
    int64_t halved = 1;
    while (halved < std::min(block_rows, TILE_ROWS)) halved *= 2;
    const int64_t room = STRIP_SUMS / halved;
    const int64_t wanted = std::min({STRIP_COLUMNS / block_columns, room, block_rows == 1 ? 4 * W : MAX_TILES});
    strip_blocks = tiles_across > 1 ? 1 : std::max<int64_t>(1, wanted / W) * W;
    strips = tiles_across > 1 ? across * tiles_across : parts(across, strip_blocks);
  }
  static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
  int64_t blocks() const { return down * across; }
  int64_t tiles() const { return blocks() * tiles_down * tiles_across; }
  bool one_tile_each() const { return tiles_down * tiles_across == 1; }
  int64_t height(int64_t block) const { return std::min(block_rows, rows - block / across * block_rows); }
  int64_t width(int64_t block) const { return std::min(block_columns, columns - block % across * block_columns); }
};

// A tile of a block.
struct Tile {
  int64_t row, column;  // of its first element in the matrix
  int64_t rows, columns;
  int64_t place;        // of its first element in the block, row by row
  int64_t block_width;
};

// What a thread does at a time: tiles of blocks beside each other, since memory is read fastest along
// its rows; of blocks that have several tiles beside each other, a tile.
struct Strip {
  int64_t place;                // among all strips
  int n;                        // tiles
  int64_t tile, block;          // the first ones; the others follow
  int64_t row, rows, column;
  int64_t tile_columns;         // of every tile but maybe the last
  int64_t end;                  // column after the last one
  int64_t above, left;          // rows and columns of the first block before the strip
  int64_t block_width, matrix_columns;

  int64_t column_of(int b) const { return column + b * tile_columns; }
  int64_t columns_of(int b) const { return std::max<int64_t>(0, std::min(tile_columns, end - column_of(b))); }
  // Of all of them, from tile b on, that are worked on at once.
  int64_t columns_from(int b) const { return std::min(W * tile_columns, end - column_of(b)); }
  // Of a row of tile b in the matrix.
  int64_t offset(int64_t r, int b) const { return (row + r) * matrix_columns + column_of(b); }
  // Tiles from b on that are worked on at once.
  int group(int b) const { return std::min(W, n - b); }
  Tile tile_of(int b) const {
    const int64_t width = std::min(block_width, matrix_columns - column_of(b) + left);
    return {row, column_of(b), rows, columns_of(b), above * width + left, width};
  }
};

template <class Work>
inline void each_strip(const Grid& g, int threads, Work work) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads) if (g.rows * g.columns > 16384 && threads > 1)
#endif
  {
    const IeeeMode ieee;
#if defined(_OPENMP)
#pragma omp for collapse(2) schedule(static)
#endif
    for (int64_t band = 0; band < g.bands; ++band)
      for (int64_t strip = 0; strip < g.strips; ++strip) {
        const int64_t i = band / g.tiles_down, a = band % g.tiles_down, c = strip % g.tiles_across;
        const int64_t j = g.tiles_across > 1 ? strip / g.tiles_across : strip * g.strip_blocks;
        Strip s;
        s.place = band * g.strips + strip;
        s.n = g.tiles_across > 1 ? 1 : static_cast<int>(std::min(g.strip_blocks, g.across - j));
        s.tile = ((i * g.tiles_down + a) * g.across + j) * g.tiles_across + c;
        s.block = i * g.across + j;
        s.above = a * TILE_ROWS;
        s.row = i * g.block_rows + s.above;
        s.rows = std::max<int64_t>(0, std::min({s.row + TILE_ROWS, (i + 1) * g.block_rows, g.rows}) - s.row);
        s.left = c * TILE_COLUMNS;
        s.column = j * g.block_columns + s.left;
        s.tile_columns = g.tiles_across > 1 ? TILE_COLUMNS : g.block_columns;
        s.end = std::min((j + s.n) * g.block_columns, g.columns);
        s.block_width = g.block_columns;
        s.matrix_columns = g.columns;
        work(s);
      }
  }
  (void)threads;
}

// Calls work(columns), and columns(b) says how many the strip's tile b has. Where all have 32 the compiler
// knows it: of so small blocks, loops and cases would cost as much as their values do.
template <class Work>
inline void with_columns(const Strip& s, Work work) {
  if (s.tile_columns == 32 && s.column_of(s.n) <= s.end) work([](int) { return int64_t{32}; });
  else work([&](int b) { return s.columns_of(b); });
}

// Calls visit(tile of a block, its place among the block's) row by row.
template <class Visit>
inline void tiles_of(const Grid& g, int64_t block, Visit visit) {
  const int64_t i = block / g.across, j = block % g.across;
  for (int64_t a = 0; a < g.tiles_down; ++a)
    for (int64_t c = 0; c < g.tiles_across; ++c)
      visit(((i * g.tiles_down + a) * g.across + j) * g.tiles_across + c, a * g.tiles_across + c);
}

// Calls visit(i, values from element i on, elements that count); lanes past the end are zero.
template <class Format, class Visit>
SUBULP_FLAT void each_vector(const char* row, int64_t n, Visit visit) {
  int64_t i = 0;
  for (; i + W <= n; i += W) visit(i, Format::load(row + i * Format::bytes), W);
  if (i < n) {
    char tail[W * 4] = {};
    std::memcpy(tail, row + i * Format::bytes, static_cast<size_t>((n - i) * Format::bytes));
    visit(i, Format::load(tail), static_cast<int>(n - i));
  }
}

// The numbers of up to W blocks, from memory and to it.
template <class T>
inline U load_each(const T* from, int n) {
  if (n == W && std::is_same<T, uint32_t>::value) return load_u32(from);
  alignas(64) uint32_t of[W];
  if (n == W)
    for (int b = 0; b < W; ++b) of[b] = static_cast<uint32_t>(from[b]);
  else
    for (int b = 0; b < W; ++b) of[b] = b < n ? static_cast<uint32_t>(from[b]) : 0;
  return load_u32(of);
}
inline void store_each(uint32_t* to, U x, int n) {
  if (n == W) return store_u32(to, x);
  alignas(64) uint32_t of[W];
  store_u32(of, x);
  std::memcpy(to, of, static_cast<size_t>(n) * sizeof *to);
}
inline void store_each(float* to, F x, int n) { store_part(to, x, n); }
inline void store_each_u8(void* to, U x, int n) {
  if (n == W) return store_low_u8(to, x);
  uint8_t of[W];
  store_low_u8(of, x);
  std::memcpy(to, of, static_cast<size_t>(n));
}

}  // namespace simd
