// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "extra_keys.h"
#include "hash_args.h"
#include "paged_kv/block_hash.h"
#include "paged_kv/cbor.h"
#include "paged_kv/request_hash.h"
#include "process_contents.h"
#include "request_keys.h"

#include <string>

namespace paged_kv::bindings {
namespace {

// Extra keys as Python gives them: None, or a tuple of tuples of str, int and bytes.
using ExtraKeysArg =
    std::optional<std::vector<std::vector<std::variant<py::bytes, py::str, py::int_>>>>;

std::optional<ExtraKeys> to_extra_keys(const ExtraKeysArg& arg) {
  if (!arg) return std::nullopt;
  ExtraKeys keys;
  for (const auto& items : *arg) {
    ExtraKey& key = keys.emplace_back();
    for (const auto& item : items) {
      if (const auto* bytes = std::get_if<py::bytes>(&item)) {
        const auto span = as_byte_span(*bytes);
        key.emplace_back(std::vector<std::uint8_t>(span.begin(), span.end()));
      } else if (const auto* text = std::get_if<py::str>(&item)) {
        key.emplace_back(text->cast<std::string>());
      } else {
        key.emplace_back(std::get<py::int_>(item).cast<std::int64_t>());
      }
    }
  }
  return keys;
}

py::object from_extra_keys(const std::optional<ExtraKeys>& keys) {
  if (!keys) return py::none();
  py::tuple result(keys->size());
  for (std::size_t i = 0; i < keys->size(); ++i) result[i] = to_python((*keys)[i]);
  return result;
}

void write_cbor(CborWriter& writer, const py::handle& value) {
  if (value.is_none()) {
    writer.write_null();
  } else if (py::isinstance<py::tuple>(value) || py::isinstance<py::list>(value)) {
    writer.begin_array(py::len(value));
    for (const py::handle item : value) write_cbor(writer, item);
  } else if (py::isinstance<py::bytes>(value)) {
    writer.write_bytes(as_byte_span(py::reinterpret_borrow<py::bytes>(value)));
  } else if (py::isinstance<py::str>(value)) {
    writer.write_text(value.cast<std::string>());
  } else if (py::isinstance<py::int_>(value) && !py::isinstance<py::bool_>(value)) {
    writer.write_int(value.cast<std::int64_t>());
  } else {
    throw py::type_error("only None, int, str, bytes, tuple and list are hashed, got " +
                         std::string(py::str(py::type::of(value).attr("__name__"))));
  }
}

std::vector<std::uint8_t> to_cbor(const py::object& value) {
  std::vector<std::uint8_t> message;
  CborWriter writer(message);
  write_cbor(writer, value);
  return message;
}

std::size_t checked_index(const BlockHashList& self, py::ssize_t index) {
  const auto size = static_cast<py::ssize_t>(self.hashes.size());
  if (index < 0) index += size;
  PAGED_KV_CHECK_AS(std::out_of_range, index >= 0 && index < size, "list index out of range");
  return static_cast<std::size_t>(index);
}

BlockHashList get_slice(const BlockHashList& self, const py::slice& slice) {
  py::ssize_t start = 0, stop = 0, step = 0, length = 0;
  if (!slice.compute(static_cast<py::ssize_t>(self.hashes.size()), &start, &stop, &step, &length)) {
    throw py::error_already_set();
  }
  BlockHashList result;
  for (py::ssize_t i = 0; i < length; ++i, start += step) {
    result.hashes.push_back(self.hashes[static_cast<std::size_t>(start)]);
  }
  return result;
}

void bind_block_hash_list(py::module_& m) {
  py::class_<BlockHashList>(m, "BlockHashList",
                            R"(The block hashes of a request, in one buffer.

Behaves like a list of ``bytes``. `BlockPool` reads it without a copy, so it is what a request
should keep its hashes in.

Example:
    >>> hashes = BlockHashList([bytes(32)])
    >>> hashes.append(bytes(31) + b"x")
    >>> len(hashes), hashes[-1][-1:]
    (2, b'x')
)")
      .def(py::init([](const HashesObject& hashes) {
             const BlockHashesArg arg(hashes);
             return BlockHashList{{arg.span().begin(), arg.span().end()}};
           }),
           py::arg("hashes") = py::tuple())
      .def(
          "append", [](BlockHashList& self, const BlockHash& hash) { self.hashes.push_back(hash); },
          py::arg("block_hash"), "Add a hash at the end.")
      .def(
          "extend",
          [](BlockHashList& self, const HashesObject& hashes) {
            const BlockHashesArg arg(hashes);
            // A copy, because the list may be extended by itself.
            const std::vector<BlockHash> more(arg.span().begin(), arg.span().end());
            self.hashes.insert(self.hashes.end(), more.begin(), more.end());
          },
          py::arg("block_hashes"), "Add hashes at the end.")
      .def(
          "truncate",
          [](BlockHashList& self, std::int64_t num_hashes) {
            const auto size = static_cast<std::int64_t>(self.hashes.size());
            PAGED_KV_CHECK(num_hashes >= 0 && num_hashes <= size, "num_hashes must be in [0, ",
                           size, "], got ", num_hashes);
            self.hashes.resize(static_cast<std::size_t>(num_hashes));
          },
          py::arg("num_hashes").noconvert(),
          "Drop all but the first `num_hashes`, e.g. from an edited block on.")
      .def("__len__", [](const BlockHashList& self) { return self.hashes.size(); })
      .def(
          "__getitem__",
          [](const BlockHashList& self, py::ssize_t index) {
            return self.hashes[checked_index(self, index)];
          },
          py::arg("index").noconvert())
      .def("__getitem__", &get_slice, py::arg("index"))
      .def(
          "__iter__",
          [](const BlockHashList& self) {
            return py::make_iterator<py::return_value_policy::copy>(self.hashes.begin(),
                                                                    self.hashes.end());
          },
          py::keep_alive<0, 1>())
      .def(
          "__eq__",
          [](const BlockHashList& self, const py::object& other) {
            return py::isinstance<BlockHashList>(other) &&
                   self.hashes == other.cast<const BlockHashList&>().hashes;
          },
          py::arg("other"))
      .def("__repr__", [](const BlockHashList& self) {
        return concat("BlockHashList(", self.hashes.size(), " hashes)");
      });
}

void bind_key_packing(py::module_& m) {
  m.def(
      "make_block_hash_with_group_id",
      [](const BlockHash& block_hash, GroupId group_id) {
        PAGED_KV_CHECK(group_id.valid(), "group_id must not be negative, got ", group_id);
        return BlockHashWithGroupId{block_hash, group_id};
      },
      py::arg("block_hash"), py::arg("group_id"),
      R"(Key of the prefix cache: the hash, then the group id as 4 big-endian bytes.)");
  m.def(
      "get_block_hash", [](const BlockHashWithGroupId& key) { return key.hash; }, py::arg("key"),
      "The hash in a key of the prefix cache.");
  m.def(
      "get_group_id", [](const BlockHashWithGroupId& key) { return key.group_id; }, py::arg("key"),
      "The group id in a key of the prefix cache.");
}

void bind_hash_functions(py::module_& m) {
  m.def(
      "xxh3_128",
      [](const py::bytes& message) { return to_bytes(xxh3_128(as_byte_span(message))); },
      py::arg("message"), R"(XXH3 of `message`, 16 bytes, the most significant first. For tests.

Example:
    >>> xxh3_128(b"abc").hex()[:8]
    '06b05ab6'
)");
  m.def(
      "xxhash_cbor", [](const py::object& value) { return to_bytes(xxh3_128(to_cbor(value))); },
      py::arg("value"), R"(128-bit XXH3 of the canonical CBOR encoding of `value`.

Faster than `sha256_cbor`, but whoever chooses tokens or keys can make two values with one hash; a
cache must compare more than the hash.

Args:
    value: As in `sha256_cbor`.

Returns:
    16 bytes.

Raises:
    TypeError: another type.

Source:
    vLLM 0.32 utils/hashing.py::xxhash_cbor.

Example:
    >>> len(xxhash_cbor((b"parent", (1, 2, 3), None)))
    16
)");
  m.def(
      "num_prefix_contents", [] { return process_contents()->size(); },
      "Contents of prefixes that are kept for `xxhash_cbor`: blocks of requests, and cached ones.");
  m.def(
      "sha256_cbor", [](const py::object& value) { return to_bytes(sha256(to_cbor(value))); },
      py::arg("value"),
      R"(SHA-256 of the canonical CBOR encoding of `value`.

Args:
    value: None, int of 64 bits, str, bytes, or a tuple or list of these.

Raises:
    TypeError: another type.

Source:
    vLLM 0.32 utils/hashing.py::sha256_cbor.

Example:
    >>> sha256_cbor("vllm-none-hash").hex()[:8]
    '9bd96a48'
)");
  m.def(
      "hash_block_tokens",
      [](const BlockHash& parent, const TokenIdsObject& token_ids, const ExtraKeysArg& extra_keys) {
        return with_token_ids(token_ids, [&](auto tokens) {
          return BlockHasher().hash(parent, tokens, to_extra_keys(extra_keys));
        });
      },
      py::arg("parent"), py::arg("token_ids"), py::arg("extra_keys") = py::none(),
      "sha256_cbor((parent, token_ids, extra_keys)); see paged_kv.hashing.hash_block_tokens.");
  m.def(
      "generate_block_hash_extra_keys",
      [](const py::object& request, std::int64_t start_token_idx, std::int64_t end_token_idx,
         std::int64_t start_mm_idx) {
        const RequestKeysArg keys(request);
        check_mm_features(keys.keys().mm_features);
        const BlockExtraKeys extra = generate_block_hash_extra_keys(keys.keys(), start_token_idx,
                                                                    end_token_idx, start_mm_idx);
        return py::typing::Tuple<py::typing::Optional<py::typing::Tuple<
                                     py::typing::Tuple<py::object, py::ellipsis>, py::ellipsis>>,
                                 py::int_>(
            py::make_tuple(from_extra_keys(extra.keys), extra.next_mm_idx));
      },
      py::arg("request"), py::arg("start_token_idx").noconvert(),
      py::arg("end_token_idx").noconvert(), py::arg("start_mm_idx").noconvert(),
      R"(What besides its tokens goes into the hash of a block.

Args:
    request: Any object; `lora_request`, `mm_features`, `cache_salt` and `prompt_embeds` are read
        where present, with vLLM's fields.
    start_token_idx: First token of the block.
    end_token_idx: One past its last token.
    start_mm_idx: First multimodal feature to look at; negative counts from the end.

Returns:
    (keys, next_mm_idx): `keys` is None, or a tuple of ("lora", name, path),
    ("mm", identifier, offset in the block), ("cache_salt", salt) for the first block, and
    ("prompt_embeds", sha256 of the rows), in this order.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::generate_block_hash_extra_keys.
)");
  m.def(
      "hash_full_blocks",
      [](const py::object& request, const TokenIdsObject& token_ids, std::int64_t block_size,
         std::int64_t first_block, const BlockHash& parent) {
        const RequestKeysArg keys(request);
        check_mm_features(keys.keys().mm_features);
        return with_token_ids(token_ids, [&](auto tokens) {
          return BlockHashList{
              hash_full_blocks(keys.keys(), tokens, block_size, first_block, parent)};
        });
      },
      py::arg("request"), py::arg("token_ids"), py::arg("block_size").noconvert(),
      py::arg("first_block").noconvert(), py::arg("parent"),
      R"(Hashes of a request's full blocks, from block `first_block` on.

Args:
    request: Where the extra keys come from, as in `generate_block_hash_extra_keys`.
    token_ids: The tokens from block `first_block` on: an int32 or int64 array (not copied), or a
        sequence of ints.
    block_size: Tokens per block.
    first_block: Index of the first block in the request.
    parent: Hash of the block before it; `paged_kv.hashing.NONE_HASH` for block 0.

Returns:
    One hash for each full block; a partial last block has none.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::get_request_block_hasher.
)");
}

}  // namespace

void bind_hash(py::module_& m) {
  bind_block_hash_list(m);
  bind_key_packing(m);
  bind_hash_functions(m);
}

}  // namespace paged_kv::bindings
