// SPDX-License-Identifier: Apache-2.0
//
// The choice between paged_attention_v1 and _v2 with C names, for test_attention_config.py.
#include "paged_kv/cuda/paged_attention_config.h"

#include <cstdint>

extern "C" __attribute__((visibility("default"))) bool use_v1(std::int64_t max_seq_len,
                                                              std::int64_t num_seqs,
                                                              std::int64_t num_heads,
                                                              std::int64_t head_size,
                                                              std::int64_t max_shared_bytes) {
  return paged_kv::cuda::use_v1(max_seq_len, num_seqs, num_heads, head_size, max_shared_bytes);
}
