// SPDX-License-Identifier: Apache-2.0
//
// For every CPU. A set of its own for another target (NEON) is a file like avx2.cpp and a line in
// select.cpp.
#include "ops/cpu/isa/attention_kernels_impl.h"
#include "ops/cpu/isa/gcc_vectors.h"
#include "ops/cpu/isa/instruction_sets.h"

namespace paged_kv::cpu {

constinit const AttentionKernels kScalarKernels =
    AttentionKernelsFor<GccVectors<8>>::table("scalar");

}  // namespace paged_kv::cpu
