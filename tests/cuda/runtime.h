// What runs the threads of a block and watches their memory, for the parts of the runtime itself.
//
// The runtime is compiled once, without instrumentation; kernels see `device.h` alone. All threads
// of a grid run on one thread of the CPU, so nothing here needs a lock.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cuda {

struct Index3 {
  unsigned x, y, z;
};

enum State { READY, AT_BLOCK_BARRIER, AT_WARP, AT_ACTIVE_MASK, DONE };

constexpr int LANES = 32;
constexpr int MOST_THREADS = 1024;
constexpr int MOST_GIVEN = 128;  // bytes that a lane gives to the others of its warp

// What the lanes of a warp gave to each other, and which ones did.
struct Given {
  unsigned lanes;
  alignas(16) unsigned char of[LANES][MOST_GIVEN];
};

struct Thread {
  void* context;
  State state;
  Index3 index;
  unsigned number, lane, warp;
  int line;  // of the text, where it waits
  // At a warp instruction: which one, with whom, and what it gives; then what all gave.
  const char* what;
  unsigned mask;
  const void* give;
  int size;
  Given* given;
  unsigned active;
};

extern Thread* me;
extern Index3 block_index, block_shape, grid_shape;
extern uint32_t block_number, block_start, block_sync, clock_now, launch_start;
extern bool failed;

// When lanes `a` and `b` of a warp last met at a `__syncwarp`.
extern uint32_t lanes_met[MOST_THREADS / LANES][LANES][LANES];

// Ends the launch with a message; does not come back.
[[noreturn]] void fail(const void* pc, int line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// Waits at a warp instruction until all lanes of `mask` are there, and gives `size` bytes to them.
const Given& meet(const char* what, unsigned mask, const void* give, int size, int line);

enum Access { READ, WRITE, ATOMIC };
void access(const void* address, size_t size, Access kind, const void* pc);
void settle();  // the last access has happened
bool on_stack(uintptr_t address);

void start_launch(size_t dynamic_shared);
void start_block();
void end_block();
void* shared_address(uint32_t offset);

// Asynchronous copies, which happen as late as they may.
void forget_copies();

struct Counts {  // as in cuda_runner.py
  uint64_t shuffles, atomics, barriers, switches, blocks;
  // Only while counting.
  uint64_t instructions, lanes, sectors, conflicts, longest_block, longest_warp;
};
extern Counts counts;
extern bool counting;

}  // namespace cuda
