// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "paged_kv/eviction_policy.h"

namespace paged_kv::bindings {

void bind_eviction(pybind11::module_& m) {
  pybind11::enum_<FreePlace>(m, "FreePlace",
                             R"(Where in the free queue a block goes that nobody holds any more.

What the argument `eviction_policy` of `BlockPool` and `KVCacheManager` returns.
)")
      .value("FRONT", FreePlace::kFront, "It is reused next: what it holds is lost first.")
      .value("BACK", FreePlace::kBack, "It is reused after all blocks that are free now.");
}

}  // namespace paged_kv::bindings
