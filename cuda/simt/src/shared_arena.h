// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory.h"
#include "simt/thread.h"

#include <array>
#include <cstddef>
#include <string>

namespace paged_kv::simt {

// The shared memory of the running block: dynamic part first, static arrays as threads ask for
// them, a guard after each.
class SharedArena {
 public:
  SharedArena();

  // Everything is poisoned again. max_bytes: limit of static + dynamic.
  void begin_block(std::size_t dynamic_bytes, std::size_t max_bytes);
  [[nodiscard]] void* static_array(const void* key, std::size_t num_bytes, std::size_t alignment,
                                   const char* name, Location location);
  [[nodiscard]] void* dynamic(std::size_t alignment, Location location);
  // Throws KernelError if a guard was written to. Nothing under ASan, which sees the write itself.
  void check_guards(Location location) const;

 private:
  struct Array {
    const void* key;
    std::byte* start;
    std::size_t num_bytes;
    const char* name;
  };
  static constexpr int kMaxArrays = 32;

  // The next `num_bytes` with a guard behind, filled with poison; null if there is no room.
  [[nodiscard]] std::byte* place(const void* key, std::size_t num_bytes, std::size_t alignment,
                                 const char* name);

  MappedMemory memory_;
  std::array<Array, kMaxArrays> arrays_;
  int num_arrays_ = 0;
  std::size_t used_bytes_ = 0;   // of memory_, guards included
  std::size_t array_bytes_ = 0;  // what the device would need
  std::size_t static_bytes_ = 0;
  std::size_t max_bytes_ = 0;
};

}  // namespace paged_kv::simt
