// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/prefix_contents.h"

#include <memory>

namespace paged_kv::bindings {

// The contents of all requests and pools of Python, which the GIL makes one owner thread: requests
// that have nothing to do with each other find the same blocks.
[[nodiscard]] inline const std::shared_ptr<PrefixContents>& process_contents() {
  static const auto contents = std::make_shared<PrefixContents>();
  return contents;
}

}  // namespace paged_kv::bindings
