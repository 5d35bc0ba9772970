// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/attention/paged_attention_kernel.cuh"

namespace paged_kv::cuda {

template void launch_paged_attention<Half, Float8E4M3>(const PagedAttentionParams&,
                                                       const Partitions&, cudaStream_t);

}  // namespace paged_kv::cuda
