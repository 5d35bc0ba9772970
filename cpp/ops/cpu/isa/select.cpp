// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/isa/select.h"

#include "ops/cpu/isa/instruction_sets.h"
#include "paged_kv/check.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace paged_kv::cpu {
namespace {

#if defined(__x86_64__)
bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const InstructionSet& instruction_set() {
  static const InstructionSet set = [] {
    const char* name = std::getenv("PAGED_KV_ISA");
    return select_instruction_set(name == nullptr ? "" : name);
  }();
  return set;
}

}  // namespace

std::vector<InstructionSet> available_instruction_sets() {
  std::vector<InstructionSet> result{{&kScalarKernels, &kScalarCacheKernels}};
#if defined(__x86_64__)
  if (cpu_has_avx2()) result.push_back({&kAvx2Kernels, &kAvx2CacheKernels});
  if (cpu_has_avx512()) result.push_back({&kAvx512Kernels, &kAvx2CacheKernels});
#endif
  return result;
}

InstructionSet select_instruction_set(std::string_view name) {
  constexpr std::string_view kNotYetTested = "avx512";
  const auto available = available_instruction_sets();
  std::string names;
  InstructionSet fastest = available.front();
  for (const InstructionSet& set : available) {
    const std::string_view its_name = set.attention->name;
    if (its_name == name) return set;
    if (its_name != kNotYetTested) fastest = set;
    names += concat(names.empty() ? "" : ", ", its_name);
  }
  if (name.empty()) return fastest;
  throw std::invalid_argument(
      concat("PAGED_KV_ISA: expected one of ", names, " (what this CPU can run), got ", name));
}

const AttentionKernels& attention_kernels() { return *instruction_set().attention; }

const CacheKernels& cache_kernels() { return *instruction_set().cache; }

}  // namespace paged_kv::cpu
