// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/kv_cache_config.h"
#include "paged_kv/kv_cache_spec.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace paged_kv::bindings {
namespace {

// A name ("bfloat16") or a torch or NumPy dtype.
std::string dtype_name(const py::object& dtype) {
  std::string name = py::str(py::hasattr(dtype, "name") ? dtype.attr("name") : dtype);
  const std::string prefix = "torch.";
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

AttentionFormat make_format(std::int64_t block_size, std::int64_t num_kv_heads,
                            std::int64_t head_size, const py::object& dtype,
                            std::optional<std::int64_t> head_size_v,
                            std::optional<std::int64_t> page_size_padded) {
  return {.block_size = block_size,
          .num_kv_heads = num_kv_heads,
          .head_size = head_size,
          .head_size_v = head_size_v.value_or(head_size),
          .dtype = dtype_name(dtype),
          .page_size_padded = page_size_padded};
}

std::string describe(const AttentionFormat& format) {
  return concat("block_size=", format.block_size, ", num_kv_heads=", format.num_kv_heads,
                ", head_size=", format.head_size, ", head_size_v=", format.head_size_v, ", dtype='",
                format.dtype, "'");
}

void bind_base_specs(py::module_& m) {
  py::class_<KVCacheSpec, std::shared_ptr<KVCacheSpec>>(
      m, "KVCacheSpec",
      R"(What one layer keeps per token, and for how long. Immutable; compared by value.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::KVCacheSpec.
)")
      .def_property_readonly("block_size", &KVCacheSpec::block_size, "Tokens per block.")
      .def_property_readonly("page_size_bytes", &KVCacheSpec::page_size_bytes,
                             "Bytes of one block of one layer.")
      .def_property_readonly(
          "kind", [](const KVCacheSpec& self) { return std::string(to_string(self.kind())); },
          R"("full_attention", "sliding_window" or "chunked_local_attention".)")
      .def(
          "max_memory_usage_bytes",
          [](const KVCacheSpec& self, std::int64_t max_model_len,
             std::int64_t max_in_flight_tokens) {
            return self.max_memory_usage_bytes({max_model_len, max_in_flight_tokens});
          },
          py::arg("max_model_len").noconvert(), py::arg("max_in_flight_tokens").noconvert(),
          R"(Bytes that one request needs in one layer, at most.

Args:
    max_model_len: Longest request, in tokens.
    max_in_flight_tokens: Most tokens that are scheduled and not processed yet.
)")
      .def(
          "copy_with_new_block_size",
          [](const KVCacheSpec& self, std::int64_t block_size) {
            return std::const_pointer_cast<KVCacheSpec>(self.copy_with_new_block_size(block_size));
          },
          py::arg("block_size").noconvert(), "The same with another number of tokens per block.")
      .def(
          "__eq__",
          [](const KVCacheSpec& self, const py::object& other) {
            return py::isinstance<KVCacheSpec>(other) &&
                   self.equals(other.cast<const KVCacheSpec&>());
          },
          py::arg("other"))
      .def("__hash__", [](const KVCacheSpec& self) {
        return py::hash(py::make_tuple(static_cast<int>(self.kind()), self.block_size(),
                                       self.page_size_bytes()));
      });

  py::class_<AttentionSpec, KVCacheSpec, std::shared_ptr<AttentionSpec>>(
      m, "AttentionSpec",
      R"(Keys and values of an attention layer.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::AttentionSpec.
)")
      .def_property_readonly(
          "num_kv_heads", [](const AttentionSpec& self) { return self.format().num_kv_heads; },
          "Heads of keys and values.")
      .def_property_readonly(
          "head_size", [](const AttentionSpec& self) { return self.format().head_size; },
          "Elements of a key.")
      .def_property_readonly(
          "head_size_v", [](const AttentionSpec& self) { return self.format().head_size_v; },
          "Elements of a value.")
      .def_property_readonly(
          "dtype", [](const AttentionSpec& self) { return self.format().dtype; },
          R"(Name of the element type, e.g. "bfloat16".)")
      .def_property_readonly(
          "page_size_padded",
          [](const AttentionSpec& self) { return self.format().page_size_padded; },
          "Bytes of a block, if it is larger than its contents; else None.")
      .def_property_readonly("unpadded_page_size_bytes", &AttentionSpec::unpadded_page_size_bytes,
                             "Bytes of the contents of a block.");
}

void bind_full_attention_spec(py::module_& m) {
  py::class_<FullAttentionSpec, AttentionSpec, std::shared_ptr<FullAttentionSpec>>(
      m, "FullAttentionSpec",
      R"(A layer that keeps every token until the request ends.

Args:
    block_size: Tokens per block.
    num_kv_heads: Heads of keys and values.
    head_size: Elements of a key.
    dtype: Element type: a name, or a torch or NumPy dtype.
    head_size_v: Elements of a value; None: as a key.
    page_size_padded: Bytes of a block, if more than its contents.
    sliding_window: Tokens that a query sees, if it sees fewer than are kept.
    attention_chunk_size: Tokens of a chunk, if a query sees its own chunk alone.

Raises:
    ValueError: a size out of range, an unknown dtype, or both a window and a chunk.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::FullAttentionSpec.

Example:
    >>> FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16").page_size_bytes
    65536
)")
      .def(py::init([](std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_size,
                       const py::object& dtype, std::optional<std::int64_t> head_size_v,
                       std::optional<std::int64_t> page_size_padded,
                       std::optional<std::int64_t> sliding_window,
                       std::optional<std::int64_t> attention_chunk_size) {
             return std::make_shared<FullAttentionSpec>(
                 make_format(block_size, num_kv_heads, head_size, dtype, head_size_v,
                             page_size_padded),
                 FullAttentionSpec::Attended{sliding_window, attention_chunk_size});
           }),
           py::kw_only(), py::arg("block_size").noconvert(), py::arg("num_kv_heads").noconvert(),
           py::arg("head_size").noconvert(), py::arg("dtype"),
           py::arg("head_size_v").noconvert() = py::none(),
           py::arg("page_size_padded").noconvert() = py::none(),
           py::arg("sliding_window").noconvert() = py::none(),
           py::arg("attention_chunk_size").noconvert() = py::none())
      .def_property_readonly(
          "sliding_window",
          [](const FullAttentionSpec& self) { return self.attended().sliding_window; },
          "Tokens that a query sees, if fewer than are kept; else None.")
      .def_property_readonly(
          "attention_chunk_size",
          [](const FullAttentionSpec& self) { return self.attended().attention_chunk_size; },
          "Tokens of a chunk, if a query sees its own chunk alone; else None.")
      .def("__repr__", [](const FullAttentionSpec& self) {
        return "FullAttentionSpec(" + describe(self.format()) + ")";
      });
}

void bind_sliding_window_spec(py::module_& m) {
  py::class_<SlidingWindowSpec, AttentionSpec, std::shared_ptr<SlidingWindowSpec>>(
      m, "SlidingWindowSpec",
      R"(A layer whose queries see the last `sliding_window` tokens; older ones are given back.

Args:
    block_size, num_kv_heads, head_size, dtype, head_size_v, page_size_padded: As in
        `FullAttentionSpec`.
    sliding_window: Tokens that a query sees, its own included.
    extra_retained_tokens: Tokens kept before the window, which no query sees.

Raises:
    ValueError: a size out of range, or an unknown dtype.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::SlidingWindowSpec.
)")
      .def(py::init([](std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_size,
                       const py::object& dtype, std::int64_t sliding_window,
                       std::int64_t extra_retained_tokens, std::optional<std::int64_t> head_size_v,
                       std::optional<std::int64_t> page_size_padded) {
             return std::make_shared<SlidingWindowSpec>(
                 make_format(block_size, num_kv_heads, head_size, dtype, head_size_v,
                             page_size_padded),
                 sliding_window, extra_retained_tokens);
           }),
           py::kw_only(), py::arg("block_size").noconvert(), py::arg("num_kv_heads").noconvert(),
           py::arg("head_size").noconvert(), py::arg("dtype"),
           py::arg("sliding_window").noconvert(), py::arg("extra_retained_tokens").noconvert() = 0,
           py::arg("head_size_v").noconvert() = py::none(),
           py::arg("page_size_padded").noconvert() = py::none())
      .def_property_readonly("sliding_window", &SlidingWindowSpec::sliding_window,
                             "Tokens that a query sees, its own included.")
      .def_property_readonly("extra_retained_tokens", &SlidingWindowSpec::extra_retained_tokens,
                             "Tokens kept before the window.")
      .def("__repr__", [](const SlidingWindowSpec& self) {
        return concat("SlidingWindowSpec(", describe(self.format()),
                      ", sliding_window=", self.sliding_window(), ")");
      });
}

void bind_chunked_local_attention_spec(py::module_& m) {
  py::class_<ChunkedLocalAttentionSpec, AttentionSpec, std::shared_ptr<ChunkedLocalAttentionSpec>>(
      m, "ChunkedLocalAttentionSpec",
      R"(A layer whose queries see the tokens of their own chunk; earlier chunks are given back.

Args:
    block_size, num_kv_heads, head_size, dtype, head_size_v, page_size_padded: As in
        `FullAttentionSpec`.
    attention_chunk_size: Tokens of a chunk.

Raises:
    ValueError: a size out of range, or an unknown dtype.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::ChunkedLocalAttentionSpec.
)")
      .def(py::init([](std::int64_t block_size, std::int64_t num_kv_heads, std::int64_t head_size,
                       const py::object& dtype, std::int64_t attention_chunk_size,
                       std::optional<std::int64_t> head_size_v,
                       std::optional<std::int64_t> page_size_padded) {
             return std::make_shared<ChunkedLocalAttentionSpec>(
                 make_format(block_size, num_kv_heads, head_size, dtype, head_size_v,
                             page_size_padded),
                 attention_chunk_size);
           }),
           py::kw_only(), py::arg("block_size").noconvert(), py::arg("num_kv_heads").noconvert(),
           py::arg("head_size").noconvert(), py::arg("dtype"),
           py::arg("attention_chunk_size").noconvert(),
           py::arg("head_size_v").noconvert() = py::none(),
           py::arg("page_size_padded").noconvert() = py::none())
      .def_property_readonly("attention_chunk_size",
                             &ChunkedLocalAttentionSpec::attention_chunk_size, "Tokens of a chunk.")
      .def("__repr__", [](const ChunkedLocalAttentionSpec& self) {
        return concat("ChunkedLocalAttentionSpec(", describe(self.format()),
                      ", attention_chunk_size=", self.attention_chunk_size(), ")");
      });
}

}  // namespace

void bind_spec(py::module_& m) {
  bind_base_specs(m);
  bind_full_attention_spec(m);
  bind_sliding_window_spec(m);
  bind_chunked_local_attention_spec(m);
}

}  // namespace paged_kv::bindings
