// SPDX-License-Identifier: Apache-2.0
//
// The tables that were compiled in; see select.h for the one to use.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/cache_kernels.h"

namespace paged_kv::cpu {

extern const AttentionKernels kScalarKernels;
extern const CacheKernels kScalarCacheKernels;
#if defined(__x86_64__)
extern const AttentionKernels kAvx2Kernels;
extern const CacheKernels kAvx2CacheKernels;
extern const AttentionKernels kAvx512Kernels;
#endif

}  // namespace paged_kv::cpu
