// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/no_hit_report.h"

#include <optional>

#include <pybind11/stl.h>
#include <pybind11/typing.h>

namespace paged_kv::bindings {
namespace {

void bind_reason(py::module_& m) {
  py::enum_<NoHitReason>(m, "NoHitReason", "Why a request finds no more in the prefix cache.")
      .value("CACHING_DISABLED", NoHitReason::kCachingDisabled, "Prefix caching is off.")
      .value("REQUEST_SKIPS_CACHE", NoHitReason::kRequestSkipsCache,
             "The request has `skip_reading_prefix_cache`.")
      .value("NO_BLOCK_HASHES", NoHitReason::kNoBlockHashes,
             "The request was made without a block hasher, or with one of another block size.")
      .value("NO_WHOLE_BLOCK_LEFT", NoHitReason::kNoWholeBlockLeft,
             "All whole blocks were found; a part of a block never is.")
      .value("LAST_TOKEN", NoHitReason::kLastToken,
             "All was found but the block of the last token, which must be computed.")
      .value("EAGLE_DROP", NoHitReason::kEagleDrop,
             "The block is cached, but the draft model needs its tokens computed.")
      .value("NOT_CACHED", NoHitReason::kNotCached,
             "The block is not cached: never computed with these keys, or evicted.")
      .value("EVICTED", NoHitReason::kEvicted,
             "The block was cached and has been evicted; needs `num_remembered_evictions`.")
      .value("ONLY_IN_OTHER_GROUP", NoHitReason::kOnlyInOtherGroup,
             "Another cache group has the block; this one keeps fewer, or has lost it.")
      .value("ONLY_WITHOUT_ADAPTER", NoHitReason::kOnlyWithoutAdapter,
             "The same tokens are cached without the request's adapter.")
      .value("ONLY_WITHOUT_SALT", NoHitReason::kOnlyWithoutSalt,
             "The same tokens are cached without the request's `cache_salt`.")
      .value("ONLY_WITHOUT_MEDIA", NoHitReason::kOnlyWithoutMedia,
             "The same tokens are cached without the request's media.")
      .value("ONLY_WITHOUT_EMBEDS", NoHitReason::kOnlyWithoutEmbeds,
             "The same tokens are cached without the request's `prompt_embeds`.")
      .value("ONLY_WITHOUT_EXTRA_KEYS", NoHitReason::kOnlyWithoutExtraKeys,
             "The same tokens are cached with none of these.");
}

}  // namespace

void bind_no_hit(py::module_& m) {
  bind_reason(m);
  py::class_<NoHitReport>(
      m, "NoHitReport",
      R"(What `KVCacheManager.why_no_hit` found. ``str(report)`` says it in words.

For operators: a report may tell what requests with another salt have computed.
)")
      .def_readonly("reason", &NoHitReport::reason, "Why the next longer hit is none.")
      .def_readonly("num_tokens", &NoHitReport::num_tokens, "Tokens of the request.")
      .def_readonly("num_hit_tokens", &NoHitReport::num_hit_tokens,
                    "Tokens that `get_computed_blocks` finds.")
      .def_property_readonly(
          "num_hit_blocks", [](const NoHitReport& self) { return self.num_hit_blocks; },
          "By group: the blocks of the hit, null blocks not counted.")
      .def_property_readonly(
          "num_group_hit_tokens", [](const NoHitReport& self) { return self.num_group_hit_tokens; },
          "By group: the tokens of the hit if there were no other group, and no EAGLE.")
      .def_property_readonly(
          "token_range",
          [](const NoHitReport& self) {
            return py::typing::Tuple<py::int_, py::int_>(
                py::make_tuple(self.start_token, self.end_token));
          },
          "(start, end): the tokens of the missing block, or else all that are not found.")
      .def_property_readonly(
          "kv_cache_group_id",
          [](const NoHitReport& self) -> std::optional<std::int32_t> {
            if (!self.kv_cache_group_id) return std::nullopt;
            return self.kv_cache_group_id->value();
          },
          "Group of the first block that the next longer hit lacks; None if none is missing.")
      .def_property_readonly(
          "block_index",
          [](const NoHitReport& self) -> std::optional<std::int64_t> {
            if (!self.kv_cache_group_id) return std::nullopt;
            return self.block_idx;
          },
          "Its place in the group's blocks of the request.")
      .def("__str__", &NoHitReport::message)
      .def("__repr__",
           [](const NoHitReport& self) { return "<NoHitReport: " + self.message() + ">"; });
}

}  // namespace paged_kv::bindings
