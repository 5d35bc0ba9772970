// SPDX-License-Identifier: Apache-2.0
//
// The module paged_kv._core: one bind_<unit>() per unit, no logic.

#include "bindings.h"
#include "paged_kv/check.h"

#include <map>
#include <string>

#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

// What the build system said; see CMakeLists.txt.
std::map<std::string, std::string> build_info() {
  return {
      {"compiler", PAGED_KV_COMPILER},
      {"build type", PAGED_KV_BUILD_TYPE},
      {"CUDA", PAGED_KV_CUDA_ARCHITECTURES},
      {"sanitizers", PAGED_KV_SANITIZE},
  };
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "Host core of paged_kv: block pool, prefix cache and block tables.";
  m.attr("__version__") = PAGED_KV_VERSION;
  m.def("build_info", &build_info,
        "How the native code was built: compiler, build type, CUDA architectures and sanitizers, "
        "empty where there are none.");
  py::register_exception<paged_kv::OutOfBlocksError>(m, "OutOfBlocksError", PyExc_ValueError);
  py::register_exception<paged_kv::InvariantError>(m, "InvariantError", PyExc_AssertionError);
  paged_kv::bindings::bind_sha256(m);
  paged_kv::bindings::bind_hash(m);
  paged_kv::bindings::bind_block(m);
  paged_kv::bindings::bind_hash_map(m);
  paged_kv::bindings::bind_eviction(m);
  paged_kv::bindings::bind_pool(m);
  paged_kv::bindings::bind_pool_views(m);
  paged_kv::bindings::bind_block_space_manager(m);
  paged_kv::bindings::bind_block_table(m);
  paged_kv::bindings::bind_request(m);
  paged_kv::bindings::bind_spec(m);
  paged_kv::bindings::bind_config(m);
  paged_kv::bindings::bind_sizing(m);
  paged_kv::bindings::bind_events(m);
  paged_kv::bindings::bind_metrics(m);
  paged_kv::bindings::bind_no_hit(m);
  paged_kv::bindings::bind_manager(m);
  paged_kv::bindings::bind_request_batch(m);
}
