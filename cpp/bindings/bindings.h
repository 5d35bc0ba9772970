// SPDX-License-Identifier: Apache-2.0
//
// One function per unit of the core, each in its bind_<unit>.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace paged_kv::bindings {

void bind_sha256(pybind11::module_& m);
void bind_hash(pybind11::module_& m);
void bind_block(pybind11::module_& m);
void bind_hash_map(pybind11::module_& m);
void bind_pool(pybind11::module_& m);
void bind_pool_views(pybind11::module_& m);
void bind_block_space_manager(pybind11::module_& m);
void bind_block_table(pybind11::module_& m);
void bind_request(pybind11::module_& m);
void bind_spec(pybind11::module_& m);
void bind_config(pybind11::module_& m);
void bind_sizing(pybind11::module_& m);
void bind_events(pybind11::module_& m);
void bind_eviction(pybind11::module_& m);
void bind_metrics(pybind11::module_& m);
void bind_no_hit(pybind11::module_& m);
void bind_manager(pybind11::module_& m);
void bind_request_batch(pybind11::module_& m);

}  // namespace paged_kv::bindings
