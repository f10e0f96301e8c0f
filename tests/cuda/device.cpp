// Warp instructions, atomics and asynchronous copies: what kernels call.
#include <cstring>
#include <deque>
#include <vector>

#include "runtime.h"
#include "scalars.h"

using namespace cuda;

namespace {

struct Copy {
  char* to;
  const char* from;
  unsigned size, room;  // bytes to copy; then zeros up to `room`
};
using Groups = std::deque<std::vector<Copy>>;
Groups copies[MOST_THREADS];  // by thread; the last group is still open

void finish(const Copy& c, const void* pc) {
  access(c.from, c.size, READ, pc);
  access(c.to, c.room, WRITE, pc);
  std::memcpy(c.to, c.from, c.size);
  std::memset(c.to + c.size, 0, c.room - c.size);
}

// What `old` becomes; the value that was there before.
template <class T, class Change>
T atomic(T* at, const void* pc, Change change) {
  ++counts.atomics;
  access(at, sizeof(T), ATOMIC, pc);
  T old = *at;
  *at = change(old);
  return old;
}

}  // namespace

namespace cuda {

void forget_copies() {
  for (Groups& of : copies) of.clear();
}

}  // namespace cuda

#define PC __builtin_return_address(0)

// --- lanes -----------------------------------------------------------------------------------

extern "C" void cuda_sync_warp(unsigned mask, int line) {
  meet("__syncwarp", mask, nullptr, 0, line);
}

extern "C" void cuda_shuffle(const char* what, unsigned mask, const void* in, void* out, int size,
                             int source, int line) {
  ++counts.shuffles;
  const Given& all = meet(what, mask, in, size, line);
  std::memcpy(out, all.of[source], size);
}

extern "C" unsigned cuda_ballot(unsigned mask, int predicate, int line) {
  const Given& all = meet("__ballot_sync", mask, &predicate, sizeof predicate, line);
  unsigned set = 0;
  for (int l = 0; l < LANES; ++l) {
    int theirs;
    std::memcpy(&theirs, all.of[l], sizeof theirs);
    if (all.lanes >> l & 1 && theirs) set |= 1u << l;
  }
  return set;
}

// All lanes of a warp give the same number of bytes; the result has MOST_GIVEN bytes for each.
extern "C" const unsigned char* cuda_gather(const char* what, const void* give, int size,
                                            int line) {
  const Given& all = meet(what, ~0u, give, size, line);
  if (all.lanes != ~0u) fail(nullptr, line, "%s: lanes 0x%08x alone are there", what, all.lanes);
  return all.of[0];
}

extern "C" void* cuda_from_shared(uint32_t offset) { return shared_address(offset); }

// --- asynchronous copies -----------------------------------------------------------------------

// Nothing is copied before its group is waited for; until then the place holds NaN.
extern "C" void cuda_copy_async(uint32_t to, const void* from, unsigned room, unsigned size) {
  Groups& mine = copies[me->number];
  if (mine.empty()) mine.emplace_back();
  char* place = static_cast<char*>(shared_address(to));
  access(from, size, READ, PC);
  access(place, room, WRITE, PC);
  std::memset(place, 0xff, room);
  mine.back().push_back({place, static_cast<const char*>(from), size, room});
}

extern "C" void cuda_commit_copies() {
  Groups& mine = copies[me->number];
  if (mine.empty()) mine.emplace_back();
  mine.emplace_back();
}

// Until at most `open` committed groups are left.
extern "C" void cuda_wait_copies(unsigned open) {
  Groups& mine = copies[me->number];
  for (; mine.size() > open + 1ul; mine.pop_front())
    for (const Copy& c : mine.front()) finish(c, PC);
}

// --- atomics -----------------------------------------------------------------------------------

// The types that CUDA has: nvcc refuses others, and so does g++ then.
#define FOR_INTEGERS(use) use(int) use(unsigned) use(unsigned long long)

#define ADD(T) \
  T cuda_atomic_add(T* at, T value) { return atomic(at, PC, [=](T old) { return static_cast<T>(old + value); }); }
FOR_INTEGERS(ADD) ADD(float) ADD(double) ADD(__half) ADD(__nv_bfloat16)

#define OTHERS(T)                                                                          \
  T cuda_atomic_max(T* at, T value) {                                                      \
    return atomic(at, PC, [=](T old) { return old < value ? value : old; });               \
  }                                                                                        \
  T cuda_atomic_min(T* at, T value) {                                                      \
    return atomic(at, PC, [=](T old) { return value < old ? value : old; });               \
  }                                                                                        \
  T cuda_atomic_exchange(T* at, T value) { return atomic(at, PC, [=](T) { return value; }); } \
  T cuda_atomic_swap(T* at, T expected, T value) {                                         \
    return atomic(at, PC, [=](T old) { return old == expected ? value : old; });           \
  }
FOR_INTEGERS(OTHERS)
OTHERS(long long)

float cuda_atomic_exchange(float* at, float value) {
  return atomic(at, PC, [=](float) { return value; });
}
unsigned short cuda_atomic_swap(unsigned short* at, unsigned short expected, unsigned short value) {
  return atomic(at, PC, [=](unsigned short old) { return old == expected ? value : old; });
}

#define BITS(name, op)                                                                  \
  int name(int* at, int value) { return atomic(at, PC, [=](int old) { return old op value; }); } \
  unsigned name(unsigned* at, unsigned value) {                                         \
    return atomic(at, PC, [=](unsigned old) { return old op value; });                  \
  }
BITS(cuda_atomic_and, &)
BITS(cuda_atomic_or, |)
BITS(cuda_atomic_xor, ^)
