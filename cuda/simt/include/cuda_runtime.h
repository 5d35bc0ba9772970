// SPDX-License-Identifier: Apache-2.0
//
// Stands in for CUDA's <cuda_runtime.h> when a kernel is compiled by a host compiler to run on a
// CPU (docs/testing.md). Kernel sources include it and need no change. What is missing here, a
// kernel may not use until it is added.
#pragma once

#include "simt/async_copy.h"
#include "simt/atomic.h"
#include "simt/barrier.h"
#include "simt/host_api.h"
#include "simt/language.h"
#include "simt/math.h"
#include "simt/shared.h"
#include "simt/thread.h"
#include "simt/vector_types.h"
#include "simt/warp.h"
