// SPDX-License-Identifier: Apache-2.0
//
// Extra keys of a block hash, as Python sees them.
#pragma once

#include "casters.h"
#include "paged_kv/block_hash.h"

#include <string>
#include <variant>
#include <vector>

namespace paged_kv::bindings {

[[nodiscard]] inline py::object to_python(const ExtraKeyItem& item) {
  if (const auto* number = std::get_if<std::int64_t>(&item)) return py::int_(*number);
  if (const auto* text = std::get_if<std::string>(&item)) return py::str(*text);
  const auto& bytes = std::get<std::vector<std::uint8_t>>(item);
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

// The items of a key from `first_item` on.
[[nodiscard]] inline py::tuple to_python(const ExtraKey& key, std::size_t first_item = 0) {
  py::tuple items(key.size() - first_item);
  for (std::size_t i = first_item; i < key.size(); ++i) items[i - first_item] = to_python(key[i]);
  return items;
}

}  // namespace paged_kv::bindings
