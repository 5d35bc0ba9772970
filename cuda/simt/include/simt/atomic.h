// SPDX-License-Identifier: Apache-2.0
//
// CUDA's atomic functions: relaxed, for the types that the device has them for.
//
// Threads of a launch take turns on one OS thread, so plain code would do; atomic instructions are
// used so that TSan tells an atomic from a racing access. Ordering comes from __threadfence alone.
#pragma once

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace paged_kv::simt {

// For TSan, around each atomic: see memory_fence(). Nothing elsewhere.
void before_atomic(const void* address);
void after_atomic(const void* address);

template <class T, class... Allowed>
concept OneOf = (std::same_as<T, Allowed> || ...);

template <class T>
concept AtomicWord = OneOf<T, int, unsigned int, unsigned long long>;
template <class T>
concept AtomicOrdered = AtomicWord<T> || std::same_as<T, long long>;
// half types join through cuda_fp16.h and cuda_bf16.h
template <class T>
inline constexpr bool kIsAtomicFloat = OneOf<T, float, double>;

// Replaces *address by update(*address); returns the old value.
template <class T, class F>
T atomic_update(T* address, F update) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;
  static_assert(sizeof(T) == sizeof(Bits));
  auto* word = reinterpret_cast<Bits __attribute__((__may_alias__))*>(address);
  before_atomic(address);
  Bits old = __atomic_load_n(word, __ATOMIC_RELAXED);
  Bits desired;
  do {
    desired = std::bit_cast<Bits>(update(std::bit_cast<T>(old)));
  } while (
      !__atomic_compare_exchange_n(word, &old, desired, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  after_atomic(address);
  return std::bit_cast<T>(old);
}

}  // namespace paged_kv::simt

template <class T>
  requires paged_kv::simt::AtomicWord<T> || paged_kv::simt::kIsAtomicFloat<T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) {
    if constexpr (std::same_as<T, int>) {
      return static_cast<int>(static_cast<unsigned>(old) + static_cast<unsigned>(value));
    } else {
      return static_cast<T>(old + value);
    }
  });
}
template <class T>
  requires paged_kv::simt::OneOf<T, int, unsigned int>
T atomicSub(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) {
    return static_cast<T>(static_cast<unsigned>(old) - static_cast<unsigned>(value));
  });
}
template <paged_kv::simt::AtomicOrdered T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) { return old < value ? value : old; });
}
template <paged_kv::simt::AtomicOrdered T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) { return value < old ? value : old; });
}
template <class T>
  requires paged_kv::simt::AtomicWord<T> || std::same_as<T, float>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T) { return value; });
}
template <class T>
  requires paged_kv::simt::AtomicWord<T> || std::same_as<T, unsigned short>
T atomicCAS(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address,
                                       [=](T old) { return old == compare ? value : old; });
}
template <paged_kv::simt::AtomicWord T>
T atomicAnd(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) { return old & value; });
}
template <paged_kv::simt::AtomicWord T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) { return old | value; });
}
template <paged_kv::simt::AtomicWord T>
T atomicXor(T* address, std::type_identity_t<T> value) {
  return paged_kv::simt::atomic_update(address, [=](T old) { return old ^ value; });
}
// Counts 0, 1, ..., limit, 0, ...
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return paged_kv::simt::atomic_update(address,
                                       [=](unsigned old) { return old >= limit ? 0u : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned limit) {
  return paged_kv::simt::atomic_update(
      address, [=](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}
