// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "simt/thread.h"

#include <cstring>
#include <string>

namespace paged_kv::simt {

// The same call in the source. Instances of one template share their places.
[[nodiscard]] inline bool same_place(const Location& a, const Location& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

[[nodiscard]] inline std::string to_string(const Location& location) {
  return std::string(location.file_name()) + ":" + std::to_string(location.line()) + ":" +
         std::to_string(location.column());
}

}  // namespace paged_kv::simt
