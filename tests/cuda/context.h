// Switching from one fiber to another on one thread of the CPU.
//
// `swapcontext` asks the kernel for the signal mask at each switch: a shuffle then takes 530 ns per
// lane instead of 90. So it is the fallback of processors that have no few lines of their own here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(CUDA_UCONTEXT)
#define CUDA_UCONTEXT
#endif
#ifdef CUDA_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda {

#ifdef CUDA_UCONTEXT

inline void switch_to(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}

// A context that enters `start` when switched to; it lies at the top of its stack.
inline void* new_context(char* stack, size_t size, void (*start)()) {
  size_t room = (sizeof(ucontext_t) + 63) / 64 * 64;
  auto* made = reinterpret_cast<ucontext_t*>(stack + size - room);
  getcontext(made);
  made->uc_stack.ss_sp = stack;
  made->uc_stack.ss_size = size - room;
  made->uc_link = nullptr;
  makecontext(made, start, 0);
  return made;
}

#else

// Saves the registers that a callee must keep, and the stack pointer; then the reverse.
extern "C" void cuda_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_switch
.hidden cuda_switch
.type cuda_switch, @function
cuda_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cuda_switch, .-cuda_switch
)");
constexpr int SAVED_WORDS = 6;  // then the address to return to
#else
asm(R"(
.text
.globl cuda_switch
.hidden cuda_switch
.type cuda_switch, %function
cuda_switch:
  sub sp, sp, #160
  stp x30, x29, [sp, #0]
  stp x19, x20, [sp, #16]
  stp x21, x22, [sp, #32]
  stp x23, x24, [sp, #48]
  stp x25, x26, [sp, #64]
  stp x27, x28, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x30, x29, [sp, #0]
  ldp x19, x20, [sp, #16]
  ldp x21, x22, [sp, #32]
  ldp x23, x24, [sp, #48]
  ldp x25, x26, [sp, #64]
  ldp x27, x28, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cuda_switch, .-cuda_switch
)");
#endif

inline void switch_to(void** save, void* to) { cuda_switch(save, to); }

// A context that enters `start` when switched to.
inline void* new_context(char* stack, size_t size, void (*start)()) {
#if defined(__x86_64__)
  // On entry the stack is 8 bytes off a multiple of 16, as after a call.
  auto** top = reinterpret_cast<void**>(stack + size) - 2;
  *top = reinterpret_cast<void*>(start);
  top -= SAVED_WORDS;
  std::memset(top, 0, SAVED_WORDS * sizeof(void*));
  return top;
#else
  auto** top = reinterpret_cast<void**>(stack + size - 160);
  std::memset(top, 0, 160);
  *top = reinterpret_cast<void*>(start);
  return top;
#endif
}

#endif

}  // namespace cuda
