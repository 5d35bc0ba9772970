// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/kv_events.h"

#include <vector>

#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

namespace paged_kv::bindings {

// An event with the form in which it shows hashes: 64-bit integers, or bytes.
template <class Event>
struct PythonEvent {
  Event event;
  bool use_int_block_hashes;
};

using EventList = pybind11::typing::List<pybind11::object>;

[[nodiscard]] EventList to_python(std::vector<KVCacheEvent> events, bool use_int_block_hashes);

}  // namespace paged_kv::bindings
