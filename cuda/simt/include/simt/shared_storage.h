// SPDX-License-Identifier: Apache-2.0
//
// The emulator's side of paged_kv/cuda/shared.cuh.
#pragma once

#include "simt/shared.h"

#include <type_traits>

namespace paged_kv::simt {

template <class T, class Tag>
inline char shared_key{};  // its address tells <T, Tag> apart

// "const char* ...::type_name() [with T = float [32]]", for messages.
template <class T>
[[nodiscard]] const char* type_name() {
  return __PRETTY_FUNCTION__;
}

}  // namespace paged_kv::simt

namespace paged_kv::cuda {

template <class T, class Tag = T>
[[nodiscard]] T& static_shared(simt::Location location = simt::Location::current()) {
  static_assert(std::is_trivially_default_constructible_v<T>);
  return *static_cast<T*>(simt::static_shared_storage(&simt::shared_key<T, Tag>, sizeof(T),
                                                      alignof(T), simt::type_name<T>(), location));
}

template <class T>
[[nodiscard]] T* dynamic_shared(simt::Location location = simt::Location::current()) {
  return static_cast<T*>(simt::dynamic_shared_storage(alignof(T), location));
}

}  // namespace paged_kv::cuda
