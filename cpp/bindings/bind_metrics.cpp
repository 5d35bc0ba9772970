// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/kv_cache_metrics.h"
#include "paged_kv/prefix_cache_stats.h"

#include <memory>

namespace paged_kv::bindings {

void bind_metrics(py::module_& m) {
  py::class_<KVCacheEvictionEvent>(m, "KVCacheEvictionEvent",
                                   R"(The life of a block's content.

Source:
    vLLM 0.32 v1/metrics/stats.py::KVCacheEvictionEvent.
)")
      .def_readonly("lifetime_seconds", &KVCacheEvictionEvent::lifetime_seconds,
                    "From one allocation of the block to the next.")
      .def_readonly("idle_seconds", &KVCacheEvictionEvent::idle_seconds, "Since it was last found.")
      .def_property_readonly(
          "reuse_gaps_seconds",
          [](const KVCacheEvictionEvent& self) { return self.reuse_gaps_seconds; },
          "Between the last times that it was found, at most three.");

  py::class_<KVCacheMetricsCollector, std::shared_ptr<KVCacheMetricsCollector>>(
      m, "KVCacheMetricsCollector",
      R"(Watches a sample of a pool's blocks: how long content stays, how often it is used again.

Args:
    sample_rate: Share of the allocations that is watched, in (0, 1].
    seed: Of the choice.

Raises:
    ValueError: `sample_rate` out of range.

Source:
    vLLM 0.32 v1/core/kv_cache_metrics.py::KVCacheMetricsCollector.
)")
      .def(py::init<double, std::uint64_t>(), py::arg("sample_rate") = 0.01,
           py::arg("seed").noconvert() = 0)
      .def_property_readonly("sample_rate", &KVCacheMetricsCollector::sample_rate,
                             "Share of the allocations that is watched.")
      .def("drain_events", &KVCacheMetricsCollector::drain_events,
           "The watched blocks that were handed out again since the last call.")
      .def("reset", &KVCacheMetricsCollector::reset, "Forget everything.");

  py::class_<PrefixCacheStats>(
      m, "PrefixCacheStats",
      R"(How much of the prompts the prefix cache gave, since the last report.

Source:
    vLLM 0.32 v1/metrics/stats.py::PrefixCacheStats.
)")
      .def_readonly("reset", &PrefixCacheStats::reset, "Whether the cache was emptied.")
      .def_readonly("requests", &PrefixCacheStats::requests, "Requests that looked.")
      .def_readonly("queries", &PrefixCacheStats::queries, "Their tokens.")
      .def_readonly("hits", &PrefixCacheStats::hits, "Tokens found.")
      .def_readonly("preempted_requests", &PrefixCacheStats::preempted_requests,
                    "Requests that looked and had been preempted.")
      .def_readonly("preempted_queries", &PrefixCacheStats::preempted_queries, "Their tokens.")
      .def_readonly("preempted_hits", &PrefixCacheStats::preempted_hits, "Tokens found for them.");
}

}  // namespace paged_kv::bindings
