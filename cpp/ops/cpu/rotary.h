// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding (Su et al., "RoFormer", 2021) of queries and keys.
#pragma once

#include "ops/cpu/isa/rotary_kernels.h"
#include "ops/cpu/thread_runner.h"

#include <cstdint>

namespace paged_kv::cpu {

// Strides in elements; the last dimension is dense.
struct RotaryParams {
  RotateHead rotate_head;  // of the elements' type
  void* x;                 // [num_tokens, num_heads, head_size]
  const void* cos;         // [num_tokens, head_size]
  const void* signed_sin;  // [num_tokens, head_size]: the sine, negated in the first half
  ElementType type;        // of all three
  std::int64_t x_token_stride, x_head_stride, cos_stride, sin_stride;
  std::int64_t num_tokens, num_heads;
  std::int64_t head_size;  // even
};

// x = x * cos + roll(x, head_size / 2) * signed_sin, in place. Products and sum are rounded each,
// as where torch computes them one by one: same bits. O(elements of x). A token's bits do not
// depend on the others or on threads.
void apply_rotary(const RotaryParams& params, const ThreadRunner& runner);

}  // namespace paged_kv::cpu
