// What each thread may read and write, and which accesses race.
//
// Kernels are compiled with -fsanitize=thread and linked without its library: each load and store
// calls a hook of ours first. Buffers and shared arrays are regions; an access outside of all of
// them, or past the end of one, is an error, and so is one whose address is no multiple of its size.
//
// An element remembers who wrote it last, and two that read it or changed it by atomics, with the
// time. Time is a counter that barriers advance. Two accesses are in order if one thread does both,
// if all threads of their block met at a barrier in between, or if both lanes met at a __syncwarp.
// Of many readers two are enough, of different warps if there are: whoever writes is not both.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime.h"

namespace cuda {

bool counting;

namespace {

struct Slot {
  uint32_t thread, time;  // block * 1024 + thread, modulo 2 ** 32; time 0: nobody
};

struct Cell {
  Slot write, read[2], atomic[2];
};

struct Region {
  uintptr_t begin, end;
  unsigned element;  // bytes
  bool shared, read_only;
  std::string name;
  Cell* cells;
  size_t reserved;
};

std::vector<Region> regions;
size_t last_found;
bool watching = true;     // for races
bool equal_allowed;       // two threads may write the same value

// A write to what another thread wrote, where equal values are allowed: it is about to happen.
struct {
  bool open;
  const void* at;
  size_t size;
  unsigned char before[64];
  const void* pc;
  std::string message;
} repeated;

// Shared arrays lie in an arena, with room between them; the same for all blocks of a launch.
constexpr size_t ARENA = 4 << 20, GAP = 4096;
alignas(4096) char arena[ARENA];
size_t arena_used;
std::vector<void*> shared_arrays;
void* dynamic_array;

Cell* new_cells(size_t count, size_t& bytes) {
  bytes = count * sizeof(Cell) + 1;
  // Untouched pages take no memory, so that buffers of 2 ** 31 elements can be watched.
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == MAP_FAILED ? nullptr : static_cast<Cell*>(at);
}

void add_region(const char* name, void* at, size_t size, unsigned element, bool shared,
                bool read_only) {
  auto begin = reinterpret_cast<uintptr_t>(at);
  Region r{begin, begin + size, element, shared, read_only, name, nullptr, 0};
  r.cells = new_cells((size + element - 1) / element, r.reserved);
  regions.push_back(r);
}

template <class Wanted>
void remove_regions(Wanted wanted) {
  std::vector<Region> kept;
  for (Region& r : regions) {
    if (!wanted(r))
      kept.push_back(r);
    else if (r.cells)
      munmap(r.cells, r.reserved);
  }
  regions.swap(kept);
  last_found = 0;
}

Region* find(uintptr_t address) {
  if (last_found < regions.size()) {
    Region& r = regions[last_found];
    if (address - r.begin < r.end - r.begin) return &r;
  }
  for (size_t i = 0; i < regions.size(); ++i)
    if (address - regions[i].begin < regions[i].end - regions[i].begin) {
      last_found = i;
      return &regions[i];
    }
  return nullptr;
}

uint32_t identity() { return block_number * MOST_THREADS + me->number; }

unsigned warp_of(uint32_t thread) { return thread / LANES; }

// Whether what `slot` stands for happened before what this thread does now.
bool before(Slot slot, const Region& r) {
  if (slot.time < (r.shared ? block_start : launch_start)) return true;
  uint32_t mine = identity();
  if (slot.thread == mine) return true;
  if (slot.thread / MOST_THREADS != mine / MOST_THREADS) return false;
  if (slot.time < block_sync) return true;
  return warp_of(slot.thread) == warp_of(mine) &&
         slot.time < lanes_met[me->warp][me->lane][slot.thread % LANES];
}

void remember(Slot (&two)[2], Slot now, const Region& r) {
  if (before(two[0], r)) {
    two[0] = now;
    if (before(two[1], r)) two[1] = Slot{};
  } else if (before(two[1], r) || warp_of(two[1].thread) == warp_of(two[0].thread)) {
    two[1] = now;
  }
}

const char* const DOES[] = {"reads", "writes", "changes by an atomic"};

std::string told(uint32_t thread) {
  unsigned n = thread % MOST_THREADS;
  char text[100];
  snprintf(text, sizeof text, "block %u, thread (%u, %u, %u)", thread / MOST_THREADS,
           n % block_shape.x, n / block_shape.x % block_shape.y,
           n / block_shape.x / block_shape.y);
  return text;
}

std::string race(const Region& r, size_t cell, Access kind, Slot slot, const char* did) {
  return "race: " + told(identity()) + " " + DOES[kind] + " " + r.name + "[" +
         std::to_string(cell) + "], which " + told(slot.thread) + " " + did +
         ", with no barrier between them";
}

[[noreturn]] void fail_race(const Region& r, size_t cell, Access kind, Slot slot, const char* did,
                            const void* pc) {
  fail(pc, 0, "%s", race(r, cell, kind, slot, did).c_str());
}

void check_races(const Region& r, size_t cell, Access kind, const void* pc) {
  Cell& c = r.cells[cell];
  Slot now{identity(), clock_now};
  if (!before(c.write, r)) {
    if (!equal_allowed || kind != WRITE) fail_race(r, cell, kind, c.write, "wrote", pc);
    repeated.open = true;
    repeated.message = race(r, cell, kind, c.write, "wrote");
  }
  if (kind != ATOMIC)
    for (Slot s : c.atomic)
      if (!before(s, r)) fail_race(r, cell, kind, s, "changed by an atomic", pc);
  if (kind != READ)
    for (Slot s : c.read)
      if (!before(s, r)) fail_race(r, cell, kind, s, "read", pc);
  if (kind == WRITE)
    c.write = now;
  else
    remember(kind == READ ? c.read : c.atomic, now, r);
}

// Sectors of 32 bytes by instruction of a warp: the n-th time that its lanes come to a place.
struct Instruction {
  unsigned lanes = 0;
  std::unordered_map<uintptr_t, unsigned> touched;  // sectors, or the addresses of atomics
};
std::unordered_map<uint64_t, Instruction> instructions;
std::unordered_map<uint64_t, unsigned> visits;

void count(uintptr_t address, size_t size, Access kind, const void* pc, bool shared) {
  auto place = reinterpret_cast<uintptr_t>(pc) % (1u << 26);
  unsigned time = visits[uint64_t(me->number) << 32 | place]++;
  Instruction& i = instructions[uint64_t(me->warp) << 58 | uint64_t(place) << 32 | time];
  ++i.lanes;
  if (kind == ATOMIC) counts.conflicts += i.touched[address | uintptr_t(1) << 63]++ != 0;
  if (!shared)
    for (uintptr_t s = address / 32; s <= (address + size - 1) / 32; ++s)
      counts.sectors += i.touched[s]++ == 0;
}

const char* nearest(uintptr_t address, long& distance) {
  const char* name = "any buffer";
  long best = 1l << 40;
  for (const Region& r : regions) {
    long off = address < r.begin ? long(address - r.begin) : long(address - r.end) + 1;
    if (std::labs(off) < best) {
      best = std::labs(off);
      name = r.name.c_str();
      distance = address < r.begin ? off : long(address - r.begin);
    }
  }
  return name;
}

}  // namespace

void settle() {
  if (!repeated.open) return;
  repeated.open = false;
  if (std::memcmp(repeated.at, repeated.before, repeated.size))
    fail(repeated.pc, 0, "%s, and with another value", repeated.message.c_str());
}

void access(const void* pointer, size_t size, Access kind, const void* pc) {
  settle();
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (!me || !size || on_stack(address)) return;
  Region* r = find(address);
  if (!r) {
    long distance = 0;
    const char* name = nearest(address, distance);
    fail(pc, 0, "out of bounds: %s %s %zu bytes at %+ld from the begin of %s, in no buffer",
         told(identity()).c_str(), DOES[kind], size, distance, name);
  }
  if (address + size > r->end)
    fail(pc, 0, "out of bounds: %s %s %zu bytes at %zu of %s, which has %zu",
         told(identity()).c_str(), DOES[kind], size, size_t(address - r->begin), r->name.c_str(),
         size_t(r->end - r->begin));
  if (size <= 16 && (size & (size - 1)) == 0 && address % size)
    fail(pc, 0, "misaligned: %s %s %zu bytes at %zu of %s", told(identity()).c_str(), DOES[kind],
         size, size_t(address - r->begin), r->name.c_str());
  if (kind != READ && r->read_only)
    fail(pc, 0, "%s %s %s[%zu], which is given to be read alone", told(identity()).c_str(),
         DOES[kind], r->name.c_str(), size_t(address - r->begin) / r->element);
  if (counting) count(address, size, kind, pc, r->shared);
  if (!watching || !r->cells) return;
  size_t last = (address + size - 1 - r->begin) / r->element;
  for (size_t cell = (address - r->begin) / r->element; cell <= last; ++cell)
    check_races(*r, cell, kind, pc);
  if (repeated.open) {
    if (size > sizeof repeated.before) fail(pc, 0, "%s", repeated.message.c_str());
    repeated.at = pointer;
    repeated.size = size;
    repeated.pc = pc;
    std::memcpy(repeated.before, pointer, size);
  }
}

void* new_shared(const char* name, size_t size, unsigned element) {
  if (arena_used + size + GAP > ARENA) fail(nullptr, 0, "too much shared memory: %s", name);
  void* at = arena + arena_used;
  std::memset(at, 0xff, size);
  arena_used = (arena_used + size + GAP + 255) / 256 * 256;
  add_region(name, at, size, element, true, false);
  return at;
}

void start_launch(size_t dynamic_shared) {
  remove_regions([](const Region& r) { return r.shared; });
  repeated.open = false;
  arena_used = GAP;
  shared_arrays.clear();
  // Types of elements are the text's own affair there, so each byte is watched.
  dynamic_array = dynamic_shared ? new_shared("dynamic shared memory", dynamic_shared, 1) : nullptr;
}

void start_block() {
  for (const Region& r : regions)
    if (r.shared) std::memset(reinterpret_cast<void*>(r.begin), 0xff, r.end - r.begin);
}

void end_block() {
  ++counts.blocks;
  if (!counting) return;
  uint64_t work = instructions.size();
  std::array<uint64_t, 64> of_warps{};
  for (auto& [which, i] : instructions) {
    counts.lanes += i.lanes;
    ++of_warps[which >> 58];
  }
  counts.instructions += work;
  counts.longest_block = std::max(counts.longest_block, work);
  uint64_t most = *std::max_element(of_warps.begin(), of_warps.end());
  counts.longest_warp = std::max(counts.longest_warp, most);
  instructions.clear();
  visits.clear();
}

void* shared_address(uint32_t offset) { return arena + offset; }

}  // namespace cuda

using namespace cuda;

extern "C" {

void cuda_watch_races(int watch, int allow_equal) {
  watching = watch;
  equal_allowed = allow_equal;
}

void cuda_add_buffer(const char* name, void* at, size_t size, unsigned element, int read_only) {
  auto begin = reinterpret_cast<uintptr_t>(at);
  remove_regions([&](const Region& r) { return r.begin < begin + size && begin < r.end; });
  add_region(name, at, size, element, false, read_only);
}

void cuda_remove_buffers() {
  remove_regions([](const Region&) { return true; });
}

// The shared array of a number that the text gives it; made when the first thread asks.
void* cuda_shared(unsigned number, const char* name, size_t size, unsigned element) {
  if (number >= shared_arrays.size()) shared_arrays.resize(number + 1);
  void*& at = shared_arrays[number];
  if (!at) at = new_shared(name, size, element);
  return at;
}

void* cuda_dynamic_shared() { return dynamic_array; }

uint32_t cuda_shared_offset(const void* pointer) {
  auto offset = static_cast<const char*>(pointer) - arena;
  if (offset < 0 || size_t(offset) >= ARENA)
    fail(__builtin_return_address(0), 0, "an address that is not in shared memory is used as one");
  return static_cast<uint32_t>(offset);
}

void cuda_read(const void* at, size_t size) { access(at, size, READ, __builtin_return_address(0)); }
void cuda_write(void* at, size_t size) { access(at, size, WRITE, __builtin_return_address(0)); }

// --- what the compiler calls -----------------------------------------------------------------

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define HOOKS(size)                                                                             \
  void __tsan_read##size(void* at) { access(at, size, READ, __builtin_return_address(0)); }     \
  void __tsan_write##size(void* at) { access(at, size, WRITE, __builtin_return_address(0)); }   \
  void __tsan_unaligned_read##size(void* at) {                                                  \
    access(at, size, READ, __builtin_return_address(0));                                        \
  }                                                                                             \
  void __tsan_unaligned_write##size(void* at) {                                                 \
    access(at, size, WRITE, __builtin_return_address(0));                                       \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void* at, size_t size) {
  access(at, size, READ, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t size) {
  access(at, size, WRITE, __builtin_return_address(0));
}

// Arrays whose size the text tells are checked by -fsanitize=bounds, locals among them.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
void __ubsan_handle_out_of_bounds(const SourceLocation* at, uintptr_t index) {
  fail(nullptr, at->line, "out of bounds: %s uses index %ld of an array",
       told(identity()).c_str(), long(index));
}

}  // extern "C"
