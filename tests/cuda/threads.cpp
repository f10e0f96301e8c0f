// The threads of a block: each is a fiber, which runs until it waits for others.
//
// Warps take turns in an order that a seed decides: seed 0 is theirs, another seed shuffles blocks,
// warps and lanes. A warp runs until each of its lanes is at a barrier of the block or has ended.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "context.h"
#include "runtime.h"

namespace cuda {

Thread* me;
Index3 block_index, block_shape, grid_shape;
uint32_t block_number, block_start, block_sync, clock_now, launch_start;
uint32_t lanes_met[MOST_THREADS / LANES][LANES][LANES];
bool failed;
Counts counts;

namespace {

constexpr size_t STACK = 1 << 20;
constexpr uint32_t CANARY = 0x5afe57ac;  // at the end of each stack

Thread threads[MOST_THREADS];
Given given[MOST_THREADS / LANES][LANES];  // by warp and the first lane of those that meet
unsigned thread_count, warp_count;
char* stacks;
void* scheduler;
char message[4096];
const void* where;
int where_line;

void (*kernel)(void**);
void** arguments;
uint64_t random_state;

unsigned random_below(unsigned n) {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return static_cast<unsigned>((random_state * 0x2545f4914f6cdd1dull >> 33) % n);
}

void shuffle(std::vector<unsigned>& order) {
  for (unsigned i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
}

void wait(State state, int line) {
  settle();
  Thread* self = me;
  self->state = state;
  self->line = line;
  switch_to(&self->context, scheduler);
}

void body() {
  kernel(arguments);
  wait(DONE, 0);
  std::abort();  // nobody resumes it
}

void resume(Thread& thread) {
  me = &thread;
  thread.state = READY;
  ++counts.switches;
  switch_to(&scheduler, thread.context);
}

Thread* lanes_of(unsigned warp) { return threads + warp * LANES; }

unsigned lane_count(unsigned warp) {
  return std::min<unsigned>(LANES, thread_count - warp * LANES);
}

unsigned lanes_in(unsigned warp, State state) {
  unsigned lanes = 0;
  for (unsigned l = 0; l < lane_count(warp); ++l)
    if (lanes_of(warp)[l].state == state) lanes |= 1u << l;
  return lanes;
}

// Lets the lanes that meet with `first` go on, if all of them are there.
bool let_meet(unsigned warp, Thread& first) {
  Thread* lanes = lanes_of(warp);
  unsigned there = 0;
  for (unsigned l = 0; l < lane_count(warp); ++l) {
    if (!(first.mask >> l & 1) || lanes[l].state == DONE) continue;
    const Thread& other = lanes[l];
    if (other.state != AT_WARP || other.mask != first.mask || other.what != first.what)
      return false;
    there |= 1u << l;
  }
  Given& all = given[warp][first.lane];
  all.lanes = there;
  // What a lane that has ended would have given is not defined: NaN, or -1.
  for (auto& bytes : all.of) std::memset(bytes, 0xff, first.size);
  ++clock_now;
  for (unsigned l = 0; l < LANES; ++l) {
    if (!(there >> l & 1)) continue;
    std::memcpy(all.of[l], lanes[l].give, lanes[l].size);
    lanes[l].given = &all;
    lanes[l].state = READY;
    if (!first.size)  // a __syncwarp; a shuffle orders no accesses to memory
      for (unsigned k = 0; k < LANES; ++k)
        if (there >> k & 1) lanes_met[warp][l][k] = clock_now;
  }
  return true;
}

[[noreturn]] void leave() {
  failed = true;
  void* unused;
  switch_to(&unused, scheduler);
  std::abort();
}

void set_message(const void* pc, int line, const char* format, va_list list) {
  vsnprintf(message, sizeof message, format, list);
  where = pc;
  where_line = line;
}

void fail_outside(int line, const char* format, ...) {
  va_list list;
  va_start(list, format);
  set_message(nullptr, line, format, list);
  va_end(list);
  failed = true;
}

const char* told(State state) {
  switch (state) {
    case AT_BLOCK_BARRIER: return "waits at __syncthreads";
    case AT_WARP: return "waits at another warp instruction";
    case DONE: return "has ended";
    default: return "runs";
  }
}

// Why the lanes that wait in a warp wait for ever.
void fail_warp(unsigned warp, unsigned waiting) {
  const Thread& first = lanes_of(warp)[__builtin_ctz(waiting)];
  for (unsigned l = 0; l < lane_count(warp); ++l) {
    const Thread& other = lanes_of(warp)[l];
    bool same = other.state == AT_WARP && other.mask == first.mask && other.what == first.what;
    if (first.mask >> l & 1 && other.state != DONE && !same) {
      fail_outside(first.line,
                   "block (%u, %u, %u), warp %u: lane %u is at %s with mask 0x%08x, which names "
                   "lane %u, but that one %s",
                   block_index.x, block_index.y, block_index.z, warp, first.lane, first.what,
                   first.mask, l, told(other.state));
      return;
    }
  }
}

void run_warp(unsigned warp, const std::vector<unsigned>& lane_order) {
  Thread* lanes = lanes_of(warp);
  while (!failed) {
    bool ran = false;
    for (unsigned l : lane_order)
      if (l < lane_count(warp) && lanes[l].state == READY && !failed) {
        resume(lanes[l]);
        ran = true;
      }
    if (ran || failed) continue;
    bool met = false;
    for (unsigned l = 0; l < lane_count(warp); ++l)
      if (lanes[l].state == AT_WARP) met |= let_meet(warp, lanes[l]);
    if (met) continue;
    // Lanes at one __activemask are active together, as on a GPU whose lanes have come together.
    if (unsigned asking = lanes_in(warp, AT_ACTIVE_MASK)) {
      int line = lanes[__builtin_ctz(asking)].line;
      unsigned active = 0;
      for (unsigned l = 0; l < lane_count(warp); ++l)
        if (asking >> l & 1 && lanes[l].line == line) active |= 1u << l;
      for (unsigned l = 0; l < lane_count(warp); ++l)
        if (active >> l & 1) {
          lanes[l].active = active;
          lanes[l].state = READY;
        }
      continue;
    }
    if (unsigned waiting = lanes_in(warp, AT_WARP)) fail_warp(warp, waiting);
    return;
  }
}

// All threads that wait at a barrier of the block pass it, if all threads wait at the same.
bool pass_barrier() {
  const Thread *there = nullptr, *ended = nullptr;
  for (unsigned i = 0; i < thread_count; ++i) {
    const Thread& t = threads[i];
    if (t.state == DONE) {
      ended = ended ? ended : &t;
    } else if (there && there->line != t.line) {
      fail_outside(there->line,
                   "block (%u, %u, %u): thread %u waits at the __syncthreads of line %d, thread "
                   "%u at that of line %d",
                   block_index.x, block_index.y, block_index.z, there->number, there->line,
                   t.number, t.line);
      return false;
    } else {
      there = there ? there : &t;
    }
  }
  if (!there) return false;
  if (ended) {
    fail_outside(there->line,
                 "block (%u, %u, %u): thread %u waits at a __syncthreads that thread %u ended "
                 "without",
                 block_index.x, block_index.y, block_index.z, there->number, ended->number);
    return false;
  }
  for (unsigned i = 0; i < thread_count; ++i) threads[i].state = READY;
  block_sync = ++clock_now;
  ++counts.barriers;
  return true;
}

void run_block(std::vector<unsigned>& warp_order, std::vector<unsigned>& lane_order, bool mix) {
  block_start = block_sync = ++clock_now;
  start_block();
  forget_copies();
  std::memset(lanes_met, 0, sizeof lanes_met[0] * warp_count);
  for (unsigned i = 0; i < thread_count; ++i) {
    Thread& t = threads[i];
    t = Thread{};
    // Tops of stacks at one place of their pages would share a few lines of the cache.
    t.context = new_context(stacks + i * STACK, STACK - i % 61 * 64, body);
    t.index = {i % block_shape.x, i / block_shape.x % block_shape.y,
               i / block_shape.x / block_shape.y};
    t.number = i;
    t.lane = i % LANES;
    t.warp = i / LANES;
  }
  do {
    if (mix) {
      shuffle(warp_order);
      shuffle(lane_order);
    }
    for (unsigned warp : warp_order)
      if (!failed) run_warp(warp, lane_order);
  } while (!failed && pass_barrier());
  if (!failed) end_block();
}

}  // namespace

void fail(const void* pc, int line, const char* format, ...) {
  va_list list;
  va_start(list, format);
  set_message(pc, line, format, list);
  va_end(list);
  leave();
}

bool on_stack(uintptr_t address) {
  auto begin = reinterpret_cast<uintptr_t>(stacks) + me->number * STACK;
  return address - begin < STACK;
}

const Given& meet(const char* what, unsigned mask, const void* give, int size, int line) {
  if (!(mask >> me->lane & 1))
    fail(nullptr, line, "%s: lane %u is not in its own mask 0x%08x", what, me->lane, mask);
  me->what = what;
  me->mask = mask;
  me->give = give;
  me->size = size;
  wait(AT_WARP, line);
  return *me->given;
}

}  // namespace cuda

using namespace cuda;

extern "C" {

Index3 cuda_thread_index() { return me->index; }
Index3 cuda_block_index() { return block_index; }
Index3 cuda_block_shape() { return block_shape; }
Index3 cuda_grid_shape() { return grid_shape; }
int cuda_lane() { return me->lane; }

void cuda_sync_threads(int line) { wait(AT_BLOCK_BARRIER, line); }

unsigned cuda_active_mask(int line) {
  wait(AT_ACTIVE_MASK, line);
  return me->active;
}

// Why the last launch failed; the address or the line of the text at which it did.
const char* cuda_message() { return message; }
const void* cuda_where() { return where; }
int cuda_where_line() { return where_line; }

const Counts* cuda_counts() { return &counts; }
void cuda_reset_counts(int count) {
  counts = Counts{};
  counting = count;
}

// Runs `grid` blocks of `block` threads; whether all of them ended.
int cuda_launch(void (*what)(void**), void** args, const unsigned* grid, const unsigned* block,
                size_t dynamic_shared, unsigned seed) {
  grid_shape = {grid[0], grid[1], grid[2]};
  block_shape = {block[0], block[1], block[2]};
  kernel = what;
  arguments = args;
  thread_count = block[0] * block[1] * block[2];
  warp_count = (thread_count + LANES - 1) / LANES;
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  failed = false;
  if (!stacks)
    stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (unsigned i = 0; i < thread_count; ++i)
    std::memcpy(stacks + i * STACK, &CANARY, sizeof CANARY);
  std::vector<unsigned> warps(warp_count), lanes(LANES);
  std::iota(warps.begin(), warps.end(), 0);
  std::iota(lanes.begin(), lanes.end(), 0);
  uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
  // An odd step through a power of two meets each block once, in another order for each seed.
  uint64_t round = 1;
  while (round < blocks) round *= 2;
  uint64_t step = seed ? random_below(1u << 30) * 2ull + 1 : 1;
  uint64_t start = seed ? random_below(1u << 30) : 0;
  launch_start = ++clock_now;
  start_launch(dynamic_shared);
  for (uint64_t i = 0; i < round && !failed; ++i) {
    uint64_t b = (start + i * step) & (round - 1);
    if (b >= blocks) continue;
    block_number = static_cast<uint32_t>(b);
    block_index = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]),
                   unsigned(b / grid[0] / grid[1])};
    run_block(warps, lanes, seed != 0);
  }
  for (unsigned i = 0; i < thread_count && !failed; ++i)
    if (std::memcmp(stacks + i * STACK, &CANARY, sizeof CANARY))
      fail_outside(0, "the stack of thread %u is too small", i);
  me = nullptr;
  return !failed;
}

}  // extern "C"
