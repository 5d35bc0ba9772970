// SPDX-License-Identifier: Apache-2.0
//
// What besides tokens makes a Python request, read as RequestKeys.
#pragma once

#include "casters.h"
#include "paged_kv/request_hash.h"

#include <optional>
#include <string>

namespace paged_kv::bindings {

// Reads `lora_request.lora_name/.lora_path`, `mm_features[i].identifier/.mm_position.offset/
// .length`, `cache_salt` and `prompt_embeds` (a C-contiguous array, one row a token). None: not
// there. Keeps the embeddings alive.
class RequestKeysArg {
 public:
  RequestKeysArg(const py::object& lora_request, const py::object& mm_features,
                 const py::object& cache_salt, const py::object& prompt_embeds) {
    if (!lora_request.is_none()) {
      keys_.lora = LoraKey{lora_request.attr("lora_name").cast<std::string>(),
                           lora_request.attr("lora_path").cast<std::string>()};
    }
    if (!mm_features.is_none()) {
      for (const py::handle feature : mm_features) {
        const py::object position = feature.attr("mm_position");
        keys_.mm_features.push_back({feature.attr("identifier").cast<std::string>(),
                                     position.attr("offset").cast<std::int64_t>(),
                                     position.attr("length").cast<std::int64_t>()});
      }
    }
    if (!cache_salt.is_none()) keys_.cache_salt = cache_salt.cast<std::string>();
    read_prompt_embeds(prompt_embeds);
  }

  // Of any object; what is missing is not there.
  explicit RequestKeysArg(const py::object& request)
      : RequestKeysArg(attribute(request, "lora_request"), attribute(request, "mm_features"),
                       attribute(request, "cache_salt"), attribute(request, "prompt_embeds")) {}

  [[nodiscard]] const RequestKeys& keys() const { return keys_; }
  [[nodiscard]] const py::array& prompt_embeds() const { return prompt_embeds_; }

 private:
  [[nodiscard]] static py::object attribute(const py::object& request, const char* name) {
    return py::getattr(request, name, py::none());
  }

  void read_prompt_embeds(const py::object& embeds) {
    if (embeds.is_none()) return;
    prompt_embeds_ = py::array::ensure(embeds);
    if (!prompt_embeds_ || prompt_embeds_.ndim() != 2 ||
        (prompt_embeds_.flags() & py::array::c_style) == 0) {
      throw py::type_error("prompt_embeds must be a C-contiguous array [num_tokens, hidden_size]");
    }
    keys_.prompt_embeds =
        PromptEmbeds{.rows = {static_cast<const std::uint8_t*>(prompt_embeds_.data()),
                              static_cast<std::size_t>(prompt_embeds_.nbytes())},
                     .bytes_per_token = prompt_embeds_.shape(1) * prompt_embeds_.itemsize()};
  }

  RequestKeys keys_;
  py::array prompt_embeds_;
};

}  // namespace paged_kv::bindings
