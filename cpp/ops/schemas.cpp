// SPDX-License-Identifier: Apache-2.0
//
// The schemas of all ops, and the only place that has them. A change here is a breaking change of
// the library (tests/ops/schemas.txt is the snapshot that a test compares with). Sizes are SymInt,
// so that torch.export keeps a batch dynamic; ops that mutate return nothing.

#include "ops/registration.h"

PAGED_KV_SCHEMAS(m) {
  // Cache writes.
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()");
  m.def(
      "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, "
      "Tensor v_scale) -> ()");

  // Attention over the cache.
  m.def(
      "paged_attention_v1(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, "
      "SymInt max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, "
      "Tensor v_scale, int tp_rank=0, int blocksparse_local_blocks=0, "
      "int blocksparse_vert_stride=0, int blocksparse_block_size=64, "
      "int blocksparse_head_sliding_step=0) -> ()");
  m.def(
      "paged_attention_v2(Tensor(a!) out, Tensor(b!) exp_sums, Tensor(c!) max_logits, "
      "Tensor(d!) tmp_out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "SymInt num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, SymInt block_size, "
      "SymInt max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, "
      "Tensor v_scale, int tp_rank=0, int blocksparse_local_blocks=0, "
      "int blocksparse_vert_stride=0, int blocksparse_block_size=64, "
      "int blocksparse_head_sliding_step=0) -> ()");
  m.def(
      "paged_attention_varlen(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor query_start_loc, Tensor seq_lens, Tensor block_tables, float scale, "
      "bool causal=True, int sliding_window=0, float softcap=0.0, Tensor? alibi_slopes=None, "
      "Tensor? sinks=None, Tensor(b!)? lse=None, str kv_cache_dtype=\"auto\", "
      "Tensor? k_scale=None, Tensor? v_scale=None, SymInt max_query_len=-1, "
      "SymInt max_seq_len=-1, Tensor? plan=None, Tensor(c!)? workspace=None, "
      "int split_tokens=0) -> ()");
  m.def(
      "plan_attention(Tensor query_start_loc, Tensor seq_lens, SymInt num_heads, "
      "SymInt num_kv_heads, SymInt head_size, SymInt num_slots, Tensor(a!) plan) -> ()");
  m.def(
      "merge_attn_states(Tensor(a!) output, Tensor(b!)? output_lse, Tensor prefix_output, "
      "Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse) -> ()");

  // What else a decoder computes in each layer, on a CPU.
  m.def("linear(Tensor(a!) out, Tensor x, Tensor panels, Tensor? bias=None) -> ()");
  m.def("rms_norm(Tensor(a!) out, Tensor input, Tensor weight, float epsilon) -> ()");
  m.def("apply_rotary(Tensor(a!) x, Tensor cos, Tensor signed_sin) -> ()");
  m.def("silu_and_mul(Tensor(a!) out, Tensor input) -> ()");
  m.def("gelu_tanh_and_mul(Tensor(a!) out, Tensor input) -> ()");

  // Whole blocks.
  m.def(
      "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) "
      "-> ()");
  m.def(
      "swap_blocks(Tensor src, Tensor(a!) dst, SymInt block_size_in_bytes, Tensor block_mapping) "
      "-> ()");
  m.def(
      "gather_cache(Tensor cache, Tensor(a!) out, Tensor block_tables, Tensor cu_seq_lens, "
      "Tensor? seq_starts=None, str kv_cache_dtype=\"auto\", Tensor? scale=None) -> ()");

  // Block tables and slots.
  m.def(
      "compute_slot_mapping(Tensor query_start_loc, Tensor positions, Tensor block_tables, "
      "Tensor(a!) slot_mapping, SymInt block_size, Tensor? idx_mapping=None) -> ()");
  m.def(
      "apply_block_table_writes(Tensor(a!) table, Tensor rows, Tensor starts, Tensor cu_lens, "
      "Tensor contents) -> ()");
  m.def(
      "gather_block_tables(Tensor table, Tensor idx_mapping, Tensor num_blocks, Tensor(a!) out) "
      "-> ()");
}
