// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding of a head, as a function that each instruction set fills in
// (AttentionKernels::rotate_head). The rules of attention_kernels.h hold here too. All sets give
// the same bits, but for which NaN.
#pragma once

#include "ops/cpu/element_type.h"

#include <stdint.h>

namespace paged_kv::cpu {

// head[i] = head[i] * cos[i] + head[(i + half_size) % (2 * half_size)] * signed_sin[i], of elements
// of one type, dense and at any address. Products and sum are rounded to the type each.
using RotateHead = void (*)(void* head, const void* cos, const void* signed_sin, int64_t half_size);

}  // namespace paged_kv::cpu
