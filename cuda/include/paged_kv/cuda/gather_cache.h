// SPDX-License-Identifier: Apache-2.0
//
// gather_cache on the device. Contract: ops/params/gather_cache.h; all pointers are device memory.
//
// The host cannot read values without waiting for the device, so they are not checked. A row of out
// is left alone if no sequence holds it, its sequence starts before 0 (in out or in the cache), its
// table is too short or names a block that the cache does not have.
//
// Quantised caches: out = element * scale, rounded to nearest even once. Otherwise bits are copied.
#pragma once

#include "ops/params/gather_cache.h"

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// A warp a token: it finds the sequence by a search 32 ways, then moves the token 16 bytes a lane
// at a time where strides and addresses allow that (fp8: 8 elements), else element by element.
void gather_cache(const GatherCacheParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
