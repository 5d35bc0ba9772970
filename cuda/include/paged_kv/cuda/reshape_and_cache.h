// SPDX-License-Identifier: Apache-2.0
//
// The cache writers on the device. Contract: ops/params/reshape_and_cache.h; all pointers are
// device memory.
//
// The host cannot read slots without waiting for the device, so they are not checked: one
// >= num_blocks * block_size is skipped like a negative one.
//
// Quantised caches: stored = saturate(x / scale), a true division, rounded to nearest even once.
// NaN stays NaN. Otherwise bits are copied.
#pragma once

#include "ops/params/reshape_and_cache.h"

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// Keys go out in chunks of 16 bytes, 8 neighbouring slots together. Values are stored 8 tokens at a
// time where a block has 8 consecutive slots from a multiple of 8 on, else one by one.
void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream);

// A thread moves two 16-byte chunks of the keys and of the values (fp8: of 8 elements) where
// strides and addresses allow that, else element by element.
void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
