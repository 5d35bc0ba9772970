// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "hash_args.h"
#include "paged_kv/request.h"
#include "process_contents.h"
#include "request_keys.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <pybind11/typing.h>

namespace paged_kv::bindings {
namespace {

using RequestPtr = std::shared_ptr<Request>;
using TokenArray = py::array_t<std::int32_t>;
using HasherFunction = py::typing::Callable<HashesObject(py::object)>;

std::vector<std::int32_t> to_token_ids(const TokenIdsObject& source) {
  return with_token_ids(source, [](auto tokens) {
    // A prompt's ids in one go: one by one takes a third of the time that hashing them does.
    using Token = typename decltype(tokens)::value_type;
    if constexpr (std::is_same_v<Token, std::int32_t>) {
      return std::vector<std::int32_t>(tokens.begin(), tokens.end());
    }
    std::vector<std::int32_t> token_ids;
    token_ids.reserve(tokens.size());
    for (const auto token : tokens) token_ids.push_back(narrow<std::int32_t>(token, "token id"));
    return token_ids;
  });
}

TokenArray to_token_array(std::span<const std::int32_t> token_ids) {
  return TokenArray(static_cast<py::ssize_t>(token_ids.size()), token_ids.data());
}

// Python's hasher as one of the core.
RequestBlockHasher wrap_hasher(HasherFunction hasher) {
  return [hasher = std::move(hasher)](const Request& request) {
    const py::object hashes = hasher(py::cast(&request, py::return_value_policy::reference));
    const BlockHashesArg arg(hashes);
    PAGED_KV_CHECK(
        std::ranges::none_of(arg.span(), [](const BlockHash& hash) { return hash.is_xxh3(); }),
        "block_hasher: a hash of ", kXxh3DigestBytes,
        " bytes is not safe without the tokens: use get_request_block_hasher(..., xxhash_cbor)");
    return std::vector<BlockHash>(arg.span().begin(), arg.span().end());
  };
}

// The prompt's ids; a prompt given as embeddings alone has token id 0 in each place.
std::vector<std::int32_t> prompt_tokens(const std::optional<TokenIdsObject>& token_ids,
                                        const py::array& prompt_embeds) {
  if (token_ids) return to_token_ids(*token_ids);
  PAGED_KV_CHECK(prompt_embeds.ndim() == 2, "prompt_token_ids or prompt_embeds must be given");
  return std::vector<std::int32_t>(static_cast<std::size_t>(prompt_embeds.shape(0)));
}

RequestPtr make_request(std::string request_id, const std::optional<TokenIdsObject>& token_ids,
                        const py::object& lora_request, const py::object& mm_features,
                        const py::object& cache_salt, const py::object& prompt_embeds,
                        std::optional<std::string> session_id, std::int64_t priority,
                        double arrival_time, bool skip_reading_prefix_cache,
                        bool reports_reused_blocks) {
  const RequestKeysArg keys(lora_request, mm_features, cache_salt, prompt_embeds);
  RequestOptions options;
  options.request_id = std::move(request_id);
  options.prompt_token_ids = prompt_tokens(token_ids, keys.prompt_embeds());
  options.keys = keys.keys();
  options.prompt_embeds_owner = std::make_shared<py::array>(keys.prompt_embeds());
  if (!lora_request.is_none()) {
    options.lora_id =
        py::getattr(lora_request, "lora_int_id", py::none()).cast<std::optional<std::int64_t>>();
  }
  options.session_id = std::move(session_id);
  options.priority = priority;
  options.arrival_time = arrival_time;
  options.skip_reading_prefix_cache = skip_reading_prefix_cache;
  options.reports_reused_blocks = reports_reused_blocks;
  return std::make_shared<Request>(std::move(options));
}

void bind_request_status(py::module_& m) {
  py::enum_<RequestStatus>(m, "RequestStatus", py::arithmetic(),
                           R"(Where a request stands; everything after `PREEMPTED` is finished.

Source:
    vLLM 0.32 v1/request.py::RequestStatus.
)")
      .value("WAITING", RequestStatus::kWaiting)
      .value("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
             RequestStatus::kWaitingForStructuredOutputGrammar)
      .value("WAITING_FOR_REMOTE_KVS", RequestStatus::kWaitingForRemoteKvs)
      .value("WAITING_FOR_STREAMING_REQ", RequestStatus::kWaitingForStreamingReq)
      .value("RUNNING", RequestStatus::kRunning)
      .value("PREEMPTED", RequestStatus::kPreempted)
      .value("FINISHED_STOPPED", RequestStatus::kFinishedStopped)
      .value("FINISHED_LENGTH_CAPPED", RequestStatus::kFinishedLengthCapped)
      .value("FINISHED_ABORTED", RequestStatus::kFinishedAborted)
      .value("FINISHED_IGNORED", RequestStatus::kFinishedIgnored)
      .value("FINISHED_ERROR", RequestStatus::kFinishedError)
      .value("FINISHED_REPETITION", RequestStatus::kFinishedRepetition);
}

void bind_progress(py::class_<Request, RequestPtr>& request) {
  // A field of RequestProgress as a property that can be set.
  const auto bind_field = [&request](const char* name, auto field, const char* doc) {
    using Field = std::remove_reference_t<decltype(std::declval<RequestProgress>().*field)>;
    request.def_property(
        name, [field](const Request& self) { return self.progress.*field; },
        [field](Request& self, Field value) { self.progress.*field = std::move(value); }, doc);
  };
  bind_field("status", &RequestProgress::status, "Where the request stands.");
  bind_field("num_computed_tokens", &RequestProgress::num_computed_tokens,
             "Tokens whose KV is in the cache, or will be after the steps under way.");
  bind_field("num_in_flight_tokens", &RequestProgress::num_in_flight_tokens,
             "Of the computed tokens, those of steps whose output is not processed yet.");
  bind_field("num_output_placeholders", &RequestProgress::num_output_placeholders,
             "Output tokens that are scheduled but not known yet (asynchronous scheduling).");
  bind_field("num_preemptions", &RequestProgress::num_preemptions,
             "How often the request lost its blocks, to be computed again.");
  bind_field("shared_prefix_boundary", &RequestProgress::shared_prefix_boundary,
             "Where a prefix ends that others share, in tokens; 0: none known.");
  bind_field("spec_token_ids", &RequestProgress::spec_token_ids,
             "Draft tokens; no part of `all_token_ids`.");
}

void bind_tokens(py::class_<Request, RequestPtr>& request) {
  request
      .def_property_readonly(
          "all_token_ids", [](const Request& self) { return to_token_array(self.all_token_ids()); },
          "Prompt and output tokens, ``[num_tokens]`` int32. A copy.")
      .def_property_readonly(
          "output_token_ids",
          [](const Request& self) {
            return to_token_array(
                self.all_token_ids().subspan(static_cast<std::size_t>(self.num_prompt_tokens())));
          },
          "Output tokens, ``[num_output_tokens]`` int32. A copy.")
      .def_property_readonly("num_tokens", &Request::num_tokens, "Prompt and output tokens.")
      .def_property_readonly("num_prompt_tokens", &Request::num_prompt_tokens,
                             "Tokens of the prompt.")
      .def_property_readonly("num_output_tokens", &Request::num_output_tokens,
                             "Tokens that were appended.")
      .def_property_readonly("num_tokens_with_spec", &Request::num_tokens_with_spec,
                             "All tokens and the drafts.")
      .def_property_readonly(
          "block_hashes",
          [](const Request& self) {
            return BlockHashList{{self.block_hashes().begin(), self.block_hashes().end()}};
          },
          "Hashes of the full blocks. A copy.")
      .def_property_readonly(
          "num_block_hashes", [](const Request& self) { return self.block_hashes().size(); },
          "How many `block_hashes` there are.")
      .def(
          "append_output_token_ids",
          [](Request& self, std::int32_t token_id) {
            self.append_output_token_ids({&token_id, 1});
          },
          py::arg("token_ids").noconvert(), "Append one token and hash a block that it fills.")
      .def(
          "append_output_token_ids",
          [](Request& self, const TokenIdsObject& token_ids) {
            self.append_output_token_ids(to_token_ids(token_ids));
          },
          py::arg("token_ids"), "Append tokens and hash the blocks that they fill.")
      .def(
          "set_block_hasher",
          [](Request& self, HasherFunction hasher) {
            self.set_block_hasher(wrap_hasher(std::move(hasher)));
          },
          py::arg("block_hasher"),
          R"(Hash blocks with ``block_hasher(request)``, which returns the hashes of the full blocks
that are not in `block_hashes` yet. Blocks that are full already are hashed at once.)")
      .def(
          "set_block_hasher",
          [](Request& self, std::int64_t hash_block_size, const BlockHash& none_hash,
             const std::string& algorithm) {
            PAGED_KV_CHECK(algorithm == "sha256_cbor" || algorithm == "xxhash_cbor",
                           "algorithm must be 'sha256_cbor' or 'xxhash_cbor', got '", algorithm,
                           "'");
            self.set_block_hasher(
                algorithm == "sha256_cbor"
                    ? make_request_block_hasher(hash_block_size, none_hash)
                    : make_xxh3_block_hasher(hash_block_size, none_hash, process_contents()));
          },
          py::arg("hash_block_size").noconvert(), py::arg("none_hash"),
          py::arg("algorithm") = "sha256_cbor",
          R"(Hash blocks of `hash_block_size` tokens without calling Python.

Args:
    hash_block_size: Tokens per block.
    none_hash: The parent of the first block.
    algorithm: ``"sha256_cbor"`` or ``"xxhash_cbor"``.

Raises:
    ValueError: another algorithm, or a request that has hashes of `xxhash_cbor`.
)");
}

void bind_identity(py::class_<Request, RequestPtr>& request) {
  request.def_property_readonly("request_id", &Request::request_id, "Names the request.")
      .def_property_readonly(
          "session_id", [](const Request& self) { return self.options().session_id; },
          "The session that it belongs to, for events.")
      .def_property_readonly(
          "priority", [](const Request& self) { return self.options().priority; },
          "Lower is served sooner.")
      .def_property_readonly(
          "arrival_time", [](const Request& self) { return self.options().arrival_time; },
          "When it came, in seconds.")
      .def_property_readonly(
          "cache_salt",
          [](const Request& self) -> std::optional<std::string> {
            if (self.keys().cache_salt.empty()) return std::nullopt;
            return self.keys().cache_salt;
          },
          "Only requests with the same salt share blocks.")
      .def_property_readonly(
          "skip_reading_prefix_cache",
          [](const Request& self) { return self.options().skip_reading_prefix_cache; },
          "Cached blocks are not reused; own blocks are cached all the same.")
      .def(
          "is_finished", [](const Request& self) { return is_finished(self.progress.status); },
          "Whether `status` is one after `PREEMPTED`.");
}

}  // namespace

void bind_request(py::module_& m) {
  bind_request_status(m);
  py::class_<Request, RequestPtr> request(
      m, "Request",
      R"(The tokens of a request, the hashes of its full blocks, and how far it has come.

`paged_kv.Request` adds vLLM's constructor.

Source:
    vLLM 0.32 v1/request.py::Request.
)");
  request.def(py::init(&make_request), py::arg("request_id"), py::arg("prompt_token_ids"),
              py::arg("lora_request") = py::none(), py::arg("mm_features") = py::none(),
              py::arg("cache_salt") = py::none(), py::arg("prompt_embeds") = py::none(),
              py::arg("session_id") = py::none(), py::arg("priority").noconvert() = 0,
              py::arg("arrival_time") = 0.0, py::arg("skip_reading_prefix_cache") = false,
              py::arg("reports_reused_blocks") = false);
  bind_identity(request);
  bind_tokens(request);
  bind_progress(request);
}

}  // namespace paged_kv::bindings
