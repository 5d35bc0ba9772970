// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace paged_kv {

// So that `items` takes `size` in all without allocating. Grows as push_back() would, not item by
// item. Throws std::bad_alloc, and changes nothing then.
template <class T, class Allocator>
void make_room(std::vector<T, Allocator>& items, std::size_t size) {
  if (size > items.capacity()) items.reserve(std::max(size, 2 * items.capacity()));
}

}  // namespace paged_kv
