// SPDX-License-Identifier: Apache-2.0
//
// The schemas of all ops, and the only place that has them. A change here is a breaking change of
// the library (tests/ops/schemas.txt is the snapshot that a test compares with).

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(paged_kv, m) {
  m.def(
      "compute_slot_mapping(Tensor query_start_loc, Tensor positions, Tensor block_tables, "
      "Tensor(a!) slot_mapping, SymInt block_size, Tensor? idx_mapping=None) -> ()");
}
