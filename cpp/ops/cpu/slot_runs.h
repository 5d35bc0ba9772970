// SPDX-License-Identifier: Apache-2.0
//
// Runs of new tokens that go to consecutive slots, so that a writer takes them together.
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv::cpu {

// How many slots from that of `token` on, up to `limit` >= 1, follow each other.
[[nodiscard]] inline std::int64_t run_length(VectorView<const std::int64_t> slot_mapping,
                                             std::int64_t token, std::int64_t limit) {
  const std::int64_t slot = slot_mapping[token];
  std::int64_t length = 1;
  while (length < limit && slot_mapping[token + length] == slot + length) ++length;
  return length;
}

}  // namespace paged_kv::cpu
