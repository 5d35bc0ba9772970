// SPDX-License-Identifier: Apache-2.0
//
// The sanitizers' interfaces as inline functions that do nothing without them.
//
// PAGED_KV_SIMT_TSAN comes from the build: under TSan the runtime itself is compiled without
// instrumentation (its bookkeeping is shared by all threads and would drown the kernel's races), so
// __SANITIZE_THREAD__ is not defined here.
#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define PAGED_KV_SIMT_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define PAGED_KV_SIMT_ASAN 0
#endif
#if PAGED_KV_SIMT_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace paged_kv::simt::sanitizer {

inline constexpr bool kAddress = PAGED_KV_SIMT_ASAN != 0;
inline constexpr bool kThread = PAGED_KV_SIMT_TSAN != 0;

// ---- AddressSanitizer

inline void start_switch([[maybe_unused]] void** fake_stack,
                         [[maybe_unused]] const void* stack_bottom,
                         [[maybe_unused]] std::size_t stack_bytes) {
#if PAGED_KV_SIMT_ASAN
  __sanitizer_start_switch_fiber(fake_stack, stack_bottom, stack_bytes);
#endif
}
inline void finish_switch([[maybe_unused]] void* fake_stack,
                          [[maybe_unused]] const void** left_stack_bottom,
                          [[maybe_unused]] std::size_t* left_stack_bytes) {
#if PAGED_KV_SIMT_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, left_stack_bottom, left_stack_bytes);
#endif
}
inline void poison([[maybe_unused]] const void* start, [[maybe_unused]] std::size_t num_bytes) {
#if PAGED_KV_SIMT_ASAN
  __asan_poison_memory_region(start, num_bytes);
#endif
}
inline void unpoison([[maybe_unused]] const void* start, [[maybe_unused]] std::size_t num_bytes) {
#if PAGED_KV_SIMT_ASAN
  __asan_unpoison_memory_region(start, num_bytes);
#endif
}

// ---- ThreadSanitizer

#if PAGED_KV_SIMT_TSAN
// `name` stands in reports.
inline void* tsan_create(const char* name) {
  void* fiber = __tsan_create_fiber(0);
  __tsan_set_fiber_name(fiber, name);
  return fiber;
}
inline void* tsan_current() { return __tsan_get_current_fiber(); }
inline void tsan_destroy(void* fiber) { __tsan_destroy_fiber(fiber); }
// A switch orders nothing: only barriers do.
inline void tsan_switch(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
inline void tsan_release(const void* token) { __tsan_release(const_cast<void*>(token)); }
inline void tsan_acquire(const void* token) { __tsan_acquire(const_cast<void*>(token)); }
#else
inline void* tsan_create(const char*) { return nullptr; }
inline void* tsan_current() { return nullptr; }
inline void tsan_destroy(void*) {}
inline void tsan_switch(void*) {}
inline void tsan_release(const void*) {}
inline void tsan_acquire(const void*) {}
#endif

}  // namespace paged_kv::simt::sanitizer
