// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/attention_planner.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"

#include <span>

namespace paged_kv {
namespace {

void plan_attention(const Tensor& query_start_loc, const Tensor& seq_lens, std::int64_t num_heads,
                    std::int64_t num_kv_heads, std::int64_t head_size, std::int64_t num_slots,
                    const Tensor& plan) {
  NamedSizes sizes;
  check(seq_lens, "seq_lens", sizes).shape({"num_seqs"}).dtype(ScalarType::Int);
  const std::int64_t num_seqs = sizes["num_seqs"];
  sizes.bind("num_seqs + 1", num_seqs + 1, "seq_lens");
  check(query_start_loc, "query_start_loc", sizes).shape({"num_seqs + 1"}).dtype(ScalarType::Int);
  check(plan, "plan", sizes).shape({"plan_size"}).dtype(ScalarType::Int).contiguous();

  const cpu::PlanProblem problem{
      .query_start_loc = vector_view<const std::int32_t>(query_start_loc),
      .seq_lens = vector_view<const std::int32_t>(seq_lens),
      .num_heads = num_heads,
      .num_kv_heads = num_kv_heads,
      .head_size = head_size,
      .num_slots = num_slots,
  };
  // Before the plan is made: that takes memory in proportion to what is asked for.
  cpu::check_plan_problem(problem);
  const std::int64_t needed = cpu::max_plan_size(num_seqs, problem.query_start_loc[num_seqs],
                                                 num_heads, num_kv_heads, head_size, num_slots);
  PAGED_KV_CHECK(plan.numel() >= needed, "plan: expected at least ", needed, " elements, got ",
                 plan.numel());
  cpu::write_plan(cpu::plan_attention(problem), num_seqs,
                  {plan.mutable_data_ptr<std::int32_t>(), static_cast<std::size_t>(plan.numel())});
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("plan_attention", PAGED_KV_BOX(&plan_attention)); }

}  // namespace paged_kv
