// Tiles of x86's matrix engine (AMX), as far as kernels use them: eight for each thread; and ARM's
// products of vectors as tiles of 2 x 2, in the order of rows.
//
// What a CPU refuses, or what would give other sums than the reader expects, is remembered as an
// error: configurations that are not valid, tiles that are not configured, products of tiles that do
// not fit. Sums are rounded as the manual says: even and odd products apart, then added; subnormal
// numbers are zero.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

namespace {

constexpr int kTiles = 8, kRows = 16, kBytes = 64;

struct Unit {
  bool configured = false;
  int rows[kTiles] = {}, bytes[kTiles] = {};
  uint8_t data[kTiles][kRows][kBytes];
};

thread_local Unit unit;
char error[256];  // the first one, of any thread
int64_t counts[4];  // configurations, releases, products, stores

int fail(const char* what, int tile) {
  if (!error[0]) std::snprintf(error, sizeof error, "%s (tile %d)", what, tile);
  return 0;
}

void count(int what) { __atomic_fetch_add(&counts[what], 1, __ATOMIC_RELAXED); }

bool usable(int tile, const char* what) {
  if (!unit.configured) return fail("tiles are not configured", tile), false;
  if (tile < 0 || tile >= kTiles || !unit.rows[tile]) return fail(what, tile), false;
  return true;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float widened(uint16_t half) {
  uint32_t bits = static_cast<uint32_t>(half) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return flushed(out);
}

// Whether tiles fit: (rows, depth) times (depth, columns).
bool fits(int sums, int left, int right) {
  for (int tile : {sums, left, right})
    if (!usable(tile, "a product of a tile that is not configured")) return false;
  if (sums == left || sums == right || left == right) return fail("a tile twice", sums), false;
  bool rows = unit.rows[sums] == unit.rows[left];
  bool columns = unit.bytes[sums] == unit.bytes[right];
  bool depth = unit.bytes[left] == 4 * unit.rows[right];
  if (!rows || !columns || !depth) return fail("a product of tiles that do not fit", sums), false;
  count(2);
  return true;
}

}  // namespace

extern "C" {

const char* tiles_error() { return error; }
const int64_t* tiles_counts() { return counts; }

void tiles_reset() {
  error[0] = 0;
  std::memset(counts, 0, sizeof counts);
}

int tiles_ldtilecfg(const uint8_t* config) {
  count(0);
  if (config[0] != 1 || config[1]) return fail("a palette or start row that is not valid", -1);
  for (int i = 2; i < 16; i++)
    if (config[i]) return fail("a reserved byte that is not zero", -1);
  std::memset(&unit, 0, sizeof unit);
  for (int t = 0; t < 16; t++) {
    int bytes = config[16 + 2 * t] + 256 * config[17 + 2 * t], rows = config[48 + t];
    bool none = !bytes && !rows;
    if (bytes > kBytes || rows > kRows || (!bytes != !rows) || (t >= kTiles && !none))
      return fail("a tile that is not valid", t);
    if (t < kTiles) unit.rows[t] = rows, unit.bytes[t] = bytes;
  }
  unit.configured = true;
  return 0;
}

int tiles_tilerelease() {
  count(1);
  unit.configured = false;
  return 0;
}

int tiles_tilezero(int8_t tile) {
  if (usable(tile, "a tile that is not configured is set")) std::memset(unit.data[tile], 0, kRows * kBytes);
  return 0;
}

int tiles_tileloadd64(int8_t tile, const uint8_t* from, int64_t stride) {
  if (!usable(tile, "a tile that is not configured is loaded")) return 0;
  std::memset(unit.data[tile], 0, kRows * kBytes);
  for (int r = 0; r < unit.rows[tile]; r++)
    std::memcpy(unit.data[tile][r], from + r * stride, unit.bytes[tile]);
  return 0;
}

int tiles_tilestored64(int8_t tile, uint8_t* to, int64_t stride) {
  if (!usable(tile, "a tile that is not configured is stored")) return 0;
  count(3);
  for (int r = 0; r < unit.rows[tile]; r++)
    std::memcpy(to + r * stride, unit.data[tile][r], unit.bytes[tile]);
  return 0;
}

int tiles_tdpbf16ps(int8_t sums, int8_t left, int8_t right) {
  if (!fits(sums, left, right)) return 0;
  for (int m = 0; m < unit.rows[sums]; m++)
    for (int n = 0; n < unit.bytes[sums] / 4; n++) {
      float even = 0, odd = 0, out;
      for (int k = 0; k < unit.rows[right]; k++) {
        uint16_t a[2], b[2];
        std::memcpy(a, unit.data[left][m] + 4 * k, 4);
        std::memcpy(b, unit.data[right][k] + 4 * n, 4);
        even = flushed(std::fma(widened(a[0]), widened(b[0]), even));
        odd = flushed(std::fma(widened(a[1]), widened(b[1]), odd));
      }
      std::memcpy(&out, unit.data[sums][m] + 4 * n, 4);
      out = flushed(flushed(out) + flushed(even + odd));
      std::memcpy(unit.data[sums][m] + 4 * n, &out, 4);
    }
  return 0;
}

int tiles_tdpbssd(int8_t sums, int8_t left, int8_t right) {
  if (!fits(sums, left, right)) return 0;
  for (int m = 0; m < unit.rows[sums]; m++)
    for (int n = 0; n < unit.bytes[sums] / 4; n++) {
      int32_t out;
      std::memcpy(&out, unit.data[sums][m] + 4 * n, 4);
      for (int k = 0; k < unit.rows[right]; k++)
        for (int i = 0; i < 4; i++)
          out += static_cast<int8_t>(unit.data[left][m][4 * k + i]) *
                 static_cast<int8_t>(unit.data[right][k][4 * n + i]);
      std::memcpy(unit.data[sums][m] + 4 * n, &out, 4);
    }
  return 0;
}

typedef float floats __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef uint16_t halves __attribute__((vector_size(16)));
typedef int8_t bytes __attribute__((vector_size(16)));

floats tiles_bfmmla(floats sums, halves a, halves b) {
  count(2);
  for (int i = 0; i < 16; i++) sums[2 * (i / 8) + i / 4 % 2] += widened(a[4 * (i / 8) + i % 4]) * widened(b[i % 8]);
  return sums;
}

ints tiles_smmla(ints sums, bytes a, bytes b) {
  count(2);
  for (int i = 0; i < 32; i++) sums[2 * (i / 16) + i / 8 % 2] += a[8 * (i / 16) + i % 8] * b[i % 16];
  return sums;
}

}  // extern "C"
