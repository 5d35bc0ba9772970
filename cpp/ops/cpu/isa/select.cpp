// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/isa/select.h"

#include "ops/cpu/isa/instruction_sets.h"
#include "paged_kv/check.h"

#include <cstdlib>

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

}  // namespace

std::vector<const AttentionKernels*> available_attention_kernels() {
  std::vector<const AttentionKernels*> result{&kScalarKernels};
#if defined(__x86_64__)
  if (cpu_has_avx2()) result.push_back(&kAvx2Kernels);
  if (cpu_has_avx512()) result.push_back(&kAvx512Kernels);
#endif
  return result;
}

const AttentionKernels& select_attention_kernels(std::string_view name) {
  const auto available = available_attention_kernels();
  if (name.empty()) {
    constexpr std::string_view kNotYetTested = "avx512";
    return available.back()->name == kNotYetTested ? *available[available.size() - 2]
                                                   : *available.back();
  }
  std::string names;
  for (const AttentionKernels* kernels : available) {
    if (kernels->name == name) return *kernels;
    names += names.empty() ? kernels->name : std::string(", ") + kernels->name;
  }
  throw std::invalid_argument(
      concat("PAGED_KV_ISA: expected one of ", names, " (what this CPU can run), got ", name));
}

const AttentionKernels& attention_kernels() {
  static const AttentionKernels& kernels = [&]() -> const AttentionKernels& {
    const char* name = std::getenv("PAGED_KV_ISA");
    return select_attention_kernels(name == nullptr ? "" : name);
  }();
  return kernels;
}

}  // namespace paged_kv::cpu
