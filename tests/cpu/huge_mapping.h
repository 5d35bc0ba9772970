// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <sys/mman.h>

namespace paged_kv::cpu::testing {

// Zeroed memory of any size that costs only the pages it touches: caches beyond 2^31 elements fit
// into a test.
template <class T>
class HugeMapping {
 public:
  explicit HugeMapping(std::int64_t num_elements)
      : num_bytes_(static_cast<std::size_t>(num_elements) * sizeof(T)),
        data_(mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data_ == MAP_FAILED) {
      throw std::invalid_argument("mmap failed");
    }
  }
  HugeMapping(const HugeMapping&) = delete;
  HugeMapping& operator=(const HugeMapping&) = delete;
  ~HugeMapping() { munmap(data_, num_bytes_); }

  [[nodiscard]] T* data() const noexcept { return static_cast<T*>(data_); }

 private:
  std::size_t num_bytes_;
  void* data_;
};

}  // namespace paged_kv::cpu::testing
