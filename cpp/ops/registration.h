// SPDX-License-Identifier: Apache-2.0
//
// Under which name and for which device a source's ops are registered. The tests build the CUDA ops
// a second time, on the emulator (PAGED_KV_EMULATED_OPS): as torch.ops.paged_kv_emulated, and for
// CPU tensors, because that is where the emulator's "device memory" lies.
#pragma once

#include <torch/csrc/stable/library.h>

#if defined(PAGED_KV_EMULATED_OPS)
#define PAGED_KV_SCHEMAS(m) STABLE_TORCH_LIBRARY(paged_kv_emulated, m)
#define PAGED_KV_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(paged_kv_emulated, CPU, m)
#else
#define PAGED_KV_SCHEMAS(m) STABLE_TORCH_LIBRARY(paged_kv, m)
#define PAGED_KV_CPU_OPS(m) STABLE_TORCH_LIBRARY_IMPL(paged_kv, CPU, m)
#define PAGED_KV_CUDA_OPS(m) STABLE_TORCH_LIBRARY_IMPL(paged_kv, CUDA, m)
#endif
