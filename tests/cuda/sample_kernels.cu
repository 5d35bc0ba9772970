// SPDX-License-Identifier: Apache-2.0
#include "planted_bugs.cuh"
#include "sample_kernels.cuh"

namespace paged_kv::cuda::testing {

template __global__ void row_softmax_kernel<float>(const float*, float*, int);
template __global__ void row_softmax_kernel<Half>(const Half*, Half*, int);
template __global__ void row_softmax_kernel<BFloat16>(const BFloat16*, BFloat16*, int);
template __global__ void quantise_kernel(const Half*, Float8E4M3*, std::int64_t, float);
template __global__ void quantise_kernel(const BFloat16*, Float8E5M2*, std::int64_t, float);
template __global__ void pipeline_kernel<PipelineBug::kNone>(const uint4*, unsigned*);
template __global__ void last_block_sums_kernel<true>(int*, unsigned*, int*);

}  // namespace paged_kv::cuda::testing
