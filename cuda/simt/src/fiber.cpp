// SPDX-License-Identifier: Apache-2.0
#include "fiber.h"

#include "sanitizers.h"

#include <cstdint>
#include <cstdlib>

#if !PAGED_KV_SIMT_USE_UCONTEXT
// void paged_kv_simt_switch(void** save_stack_pointer, void* stack_pointer): pushes what the System
// V ABI wants preserved across a call, and pops the same of the other stack.
extern "C" void paged_kv_simt_switch(void** save_stack_pointer, void* stack_pointer);
asm(R"(
.text
.globl paged_kv_simt_switch
.hidden paged_kv_simt_switch
.type paged_kv_simt_switch, @function
paged_kv_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size paged_kv_simt_switch, .-paged_kv_simt_switch
)");
#endif

namespace paged_kv::simt {
namespace {

Fiber* previous_fiber;  // the one that the running fiber was switched from

}  // namespace

void Fiber::prepare(std::span<std::byte> stack, void (*entry)()) {
  stack_bottom_ = stack.data();
  stack_bytes_ = stack.size();
  fake_stack_ = nullptr;
#if PAGED_KV_SIMT_USE_UCONTEXT
  if (getcontext(&context_) != 0) std::abort();
  context_.uc_stack.ss_sp = stack.data();
  context_.uc_stack.ss_size = stack.size();
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
#else
  // From the top: a null return address that keeps `entry` aligned as after a call, `entry` for the
  // switch's ret, and the six registers it pops.
  constexpr int kNumRegisters = 6;
  auto** top = reinterpret_cast<void**>(stack.data() + stack.size());
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kNumRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
#endif
}

void Fiber::switch_to(Fiber& from, Fiber& to, bool from_ends) {
  sanitizer::start_switch(from_ends ? nullptr : &from.fake_stack_, to.stack_bottom_,
                          to.stack_bytes_);
  sanitizer::tsan_switch(to.tsan_fiber_);
  previous_fiber = &from;
#if PAGED_KV_SIMT_USE_UCONTEXT
  if (swapcontext(&from.context_, &to.context_) != 0) std::abort();
#else
  paged_kv_simt_switch(&from.stack_pointer_, to.stack_pointer_);
#endif
  arrive(from);
}

void Fiber::arrive(Fiber& self) {
  // ASan tells the bounds of the stack that was left: the only way to learn those of the main one.
  sanitizer::finish_switch(self.fake_stack_, &previous_fiber->stack_bottom_,
                           &previous_fiber->stack_bytes_);
}

void Fiber::create_tsan_fiber(const char* name) { tsan_fiber_ = sanitizer::tsan_create(name); }
void Fiber::adopt_tsan_fiber() { tsan_fiber_ = sanitizer::tsan_current(); }
void Fiber::destroy_tsan_fiber() {
  if (tsan_fiber_ != nullptr) sanitizer::tsan_destroy(tsan_fiber_);
  tsan_fiber_ = nullptr;
}

}  // namespace paged_kv::simt
