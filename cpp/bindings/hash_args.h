// SPDX-License-Identifier: Apache-2.0
//
// Block hashes and token ids as arguments, without a copy where Python has them in one buffer.
#pragma once

#include "casters.h"
#include "paged_kv/block_hash.h"

#include <optional>
#include <span>
#include <vector>

#include <pybind11/typing.h>

namespace paged_kv::bindings {

inline int is_any_object(PyObject* object) { return object != nullptr ? 1 : 0; }

// Arguments that are read below; types of their own, so that the stub can name what is accepted.
class HashesObject : public py::object {
  PYBIND11_OBJECT_DEFAULT(HashesObject, py::object, is_any_object)
};
class TokenIdsObject : public py::object {
  PYBIND11_OBJECT_DEFAULT(TokenIdsObject, py::object, is_any_object)
};

// A list of block hashes that lives in C++.
struct BlockHashList {
  std::vector<BlockHash> hashes;
};

// The hashes of a request: a BlockHashList (no copy), or an iterable of bytes.
class BlockHashesArg {
 public:
  explicit BlockHashesArg(const py::object& source) : source_(source) {
    if (py::isinstance<BlockHashList>(source)) {
      hashes_ = source.cast<const BlockHashList&>().hashes;
      return;
    }
    for (const py::handle item : source) copies_.push_back(to_block_hash(item));
    hashes_ = copies_;
  }
  BlockHashesArg(const BlockHashesArg&) = delete;
  BlockHashesArg& operator=(const BlockHashesArg&) = delete;

  [[nodiscard]] std::span<const BlockHash> span() const { return hashes_; }

 private:
  py::object source_;  // keeps a BlockHashList alive
  std::vector<BlockHash> copies_;
  std::span<const BlockHash> hashes_;
};

// Calls `use` with the token ids as a span of int32 or int64: a contiguous array of one of these
// types as it is, any other sequence of ints as a copy.
template <class Use>
auto with_token_ids(const TokenIdsObject& source, Use use) {
  const auto is_buffer_of = [&]<class T>(T) {
    return py::isinstance<py::array_t<T, py::array::c_style>>(source) &&
           py::reinterpret_borrow<py::array>(source).ndim() == 1;
  };
  const auto use_buffer_of = [&]<class T>(T) {
    const auto array = py::reinterpret_borrow<py::array_t<T, py::array::c_style>>(source);
    return use(std::span<const T>(array.data(), static_cast<std::size_t>(array.size())));
  };
  if (is_buffer_of(std::int32_t{})) return use_buffer_of(std::int32_t{});
  if (is_buffer_of(std::int64_t{})) return use_buffer_of(std::int64_t{});

  std::vector<std::int64_t> copies;
  for (const py::handle item : source) {
    py::detail::make_caster<std::int64_t> caster;
    if (!caster.load(item, /*convert=*/false)) {
      throw py::type_error("token ids must be integers below 2**63, got " +
                           std::string(py::repr(item)));
    }
    copies.push_back(py::detail::cast_op<std::int64_t>(caster));
  }
  return use(std::span<const std::int64_t>(copies));
}

}  // namespace paged_kv::bindings

namespace pybind11::detail {

template <>
struct handle_type_name<paged_kv::bindings::HashesObject> {
  static constexpr auto name = const_name("collections.abc.Iterable[bytes]");
};

template <>
struct handle_type_name<paged_kv::bindings::TokenIdsObject> {
  static constexpr auto name =
      const_name("collections.abc.Sequence[int] | numpy.typing.NDArray[numpy.integer]");
};

}  // namespace pybind11::detail
