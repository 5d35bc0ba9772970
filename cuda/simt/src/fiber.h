// SPDX-License-Identifier: Apache-2.0
//
// Stacks to switch between on one OS thread, and what the sanitizers must be told about it.
#pragma once

#include <cstddef>
#include <span>

#if !defined(__x86_64__) || defined(PAGED_KV_SIMT_UCONTEXT)
#include <ucontext.h>
#define PAGED_KV_SIMT_USE_UCONTEXT 1
#else
#define PAGED_KV_SIMT_USE_UCONTEXT 0
#endif

namespace paged_kv::simt {

// A suspended flow of control: the launching code, or one emulated thread. Not movable while it is
// suspended. About 3 ns a switch by own assembly on x86-64, 300 ns by ucontext elsewhere.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes this fiber one that runs `entry` on `stack` at the first switch to it. `entry` begins
  // with Fiber::arrive() and never returns.
  void prepare(std::span<std::byte> stack, void (*entry)());

  // Suspends `from` (the one that runs) and resumes `to`. If `from_ends`, it is never resumed.
  static void switch_to(Fiber& from, Fiber& to, bool from_ends = false);
  static void arrive(Fiber& self);

  // TSan's identity of this fiber. A new one is ordered after what the caller has done so far and
  // with nothing else; `name` stands in reports. No-ops without TSan.
  void create_tsan_fiber(const char* name);
  void adopt_tsan_fiber();  // of the code that calls
  void destroy_tsan_fiber();

 private:
#if PAGED_KV_SIMT_USE_UCONTEXT
  ucontext_t context_;
#else
  void* stack_pointer_ = nullptr;
#endif
  const void* stack_bottom_ = nullptr;  // for ASan, with the next two
  std::size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
};

}  // namespace paged_kv::simt
