// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "extra_keys.h"
#include "kv_event.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paged_kv::bindings {
namespace {

using Stored = PythonEvent<BlockStored>;
using Removed = PythonEvent<BlockRemoved>;
using HashList = py::typing::List<py::typing::Union<py::int_, py::bytes>>;
using Hash = py::typing::Union<py::int_, py::bytes>;
using TokenList = py::typing::List<py::int_>;
using KeysOfBlocks = py::typing::Optional<py::typing::List<py::object>>;

// The low 64 bits of a hash as an integer, or its bytes.
Hash to_external(const BlockHash& hash, bool use_int_block_hashes) {
  if (!use_int_block_hashes) return Hash(to_bytes(hash.digest()));
  std::uint64_t number = 0;
  for (const std::uint8_t byte : hash.digest().last(8)) number = number << 8 | byte;
  return Hash(py::int_(number));
}

// Without the kinds of the keys: (identifier, offset) of media, the bare value of the others.
py::object to_event_keys(const std::optional<ExtraKeys>& keys) {
  if (!keys) return py::none();
  py::tuple result(keys->size());
  for (std::size_t i = 0; i < keys->size(); ++i) {
    const ExtraKey& key = (*keys)[i];
    const auto* kind = std::get_if<std::string>(&key.front());
    const bool is_medium = kind != nullptr && *kind == "mm";
    result[i] = is_medium ? py::object(to_python(key, 1)) : to_python(key[1]);
  }
  return result;
}

KeysOfBlocks event_keys_of_blocks(const Stored& self) {
  if (self.event.extra_keys.empty()) return py::none();
  py::list result;
  for (const auto& keys : self.event.extra_keys) result.append(to_event_keys(keys));
  return KeysOfBlocks(result);
}

void bind_block_stored(py::module_& m) {
  py::class_<Stored>(
      m, "BlockStored",
      R"(Blocks of one group became findable, or were reused by a request that reports that.

Source:
    vLLM 0.32 distributed/kv_events.py::BlockStored.
)")
      .def_property_readonly(
          "block_hashes",
          [](const Stored& self) {
            HashList hashes;
            for (const BlockHash& hash : self.event.block_hashes) {
              hashes.append(to_external(hash, self.use_int_block_hashes));
            }
            return hashes;
          },
          "One hash for each block: its low 64 bits, or its bytes. Blocks that are left out of the "
          "cache have none.")
      .def_property_readonly(
          "parent_block_hash",
          [](const Stored& self) -> py::typing::Optional<Hash> {
            if (!self.event.parent_block_hash) return py::none();
            return to_external(*self.event.parent_block_hash, self.use_int_block_hashes);
          },
          "Hash of the block before the first; None at the beginning.")
      .def_property_readonly(
          "token_ids",
          [](const Stored& self) {
            TokenList tokens;
            for (const std::int32_t token : self.event.token_ids) tokens.append(token);
            return tokens;
          },
          "Tokens of the whole range of blocks, those left out included.")
      .def_property_readonly(
          "block_size", [](const Stored& self) { return self.event.block_size; },
          "Tokens per block.")
      .def_property_readonly(
          "lora_id", [](const Stored& self) { return self.event.lora_id; },
          "Id of the adapter, or None.")
      .def_property_readonly(
          "lora_name", [](const Stored& self) { return self.event.lora_name; },
          "Name of the adapter, or None.")
      .def_property_readonly("extra_keys", &event_keys_of_blocks,
                             "What besides tokens names each block, without the kinds of the keys.")
      .def_property_readonly(
          "group_idx", [](const Stored& self) { return self.event.group_idx; }, "The cache group.")
      .def_property_readonly(
          "session_id", [](const Stored& self) { return self.event.session_id; },
          "The request's session, or None.")
      .def_property_readonly(
          "kv_cache_spec_kind", [](const Stored& self) { return self.event.kv_cache_spec_kind; },
          "The group's kind of attention.")
      .def_property_readonly(
          "kv_cache_spec_sliding_window",
          [](const Stored& self) { return self.event.kv_cache_spec_sliding_window; },
          "Its window in tokens, or None.")
      .def_property_readonly(
          "medium", [](const Stored&) { return "GPU"; }, "Where the blocks are.");
}

void bind_block_removed(py::module_& m) {
  py::class_<Removed>(m, "BlockRemoved",
                      R"(A block can no longer be found under this hash.

Source:
    vLLM 0.32 distributed/kv_events.py::BlockRemoved.
)")
      .def_property_readonly(
          "block_hashes",
          [](const Removed& self) {
            HashList hashes;
            hashes.append(to_external(self.event.block_hash, self.use_int_block_hashes));
            return hashes;
          },
          "One hash: its low 64 bits, or its bytes.")
      .def_property_readonly(
          "group_idx", [](const Removed& self) { return self.event.group_idx; }, "The cache group.")
      .def_property_readonly(
          "medium", [](const Removed&) { return "GPU"; }, "Where the block was.");
}

}  // namespace

EventList to_python(std::vector<KVCacheEvent> events, bool use_int_block_hashes) {
  EventList result;
  for (KVCacheEvent& event : events) {
    if (auto* stored = std::get_if<BlockStored>(&event)) {
      result.append(py::cast(Stored{std::move(*stored), use_int_block_hashes}));
    } else if (const auto* removed = std::get_if<BlockRemoved>(&event)) {
      result.append(py::cast(Removed{*removed, use_int_block_hashes}));
    } else {
      result.append(py::cast(AllBlocksCleared{}));
    }
  }
  return result;
}

void bind_events(py::module_& m) {
  bind_block_stored(m);
  bind_block_removed(m);
  py::class_<AllBlocksCleared>(m, "AllBlocksCleared",
                               R"(The prefix cache was emptied.

Source:
    vLLM 0.32 distributed/kv_events.py::AllBlocksCleared.
)");
}

}  // namespace paged_kv::bindings
