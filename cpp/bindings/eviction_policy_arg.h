// SPDX-License-Identifier: Apache-2.0
//
// A Python function as an EvictionPolicy.
#pragma once

#include "block_handle.h"
#include "paged_kv/eviction_policy.h"

#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

namespace paged_kv::bindings {

using PlaceFunction = pybind11::typing::Callable<FreePlace(BlockHandle)>;

// Asks the function for each block, with a copy of it. Freeing cannot fail, so if the function
// raises, that is reported to sys.unraisablehook and the block goes where LRU puts it.
class PythonEvictionPolicy final : public EvictionPolicy {
 public:
  explicit PythonEvictionPolicy(PlaceFunction function) : function_(std::move(function)) {}

  [[nodiscard]] FreePlace place(const KVCacheBlock& block) noexcept override {
    try {
      auto storage = std::make_shared<BlockStorage>();
      storage->own.push_back(block);
      return function_(BlockHandle{std::move(storage), BlockId(0)}).cast<FreePlace>();
    } catch (pybind11::error_already_set& error) {
      error.discard_as_unraisable("eviction_policy");
    } catch (const std::exception& error) {  // it returned something else
      PyErr_SetString(PyExc_TypeError, error.what());
      PyErr_WriteUnraisable(function_.ptr());
    }
    return lru_place(block);
  }

 private:
  PlaceFunction function_;
};

// Null for None.
[[nodiscard]] inline std::shared_ptr<EvictionPolicy> to_eviction_policy(
    std::optional<PlaceFunction> function) {
  if (!function) return nullptr;
  return std::make_shared<PythonEvictionPolicy>(std::move(*function));
}

}  // namespace paged_kv::bindings
