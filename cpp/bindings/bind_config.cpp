// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/kv_cache_config.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace paged_kv::bindings {
namespace {

using SpecPtr = std::shared_ptr<KVCacheSpec>;

void bind_group_spec(py::module_& m) {
  py::class_<KVCacheGroupSpec>(m, "KVCacheGroupSpec",
                               R"(Layers that share one block table.

Args:
    layer_names: The layers.
    kv_cache_spec: What each of them keeps.
    is_eagle_group: Whether layers of an EAGLE or MTP draft model are among them.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::KVCacheGroupSpec.
)")
      .def(py::init([](std::vector<std::string> layer_names, const SpecPtr& kv_cache_spec,
                       bool is_eagle_group) {
             return KVCacheGroupSpec{std::move(layer_names), kv_cache_spec, is_eagle_group};
           }),
           py::arg("layer_names"), py::arg("kv_cache_spec").none(false),
           py::arg("is_eagle_group").noconvert() = false)
      .def_readonly("layer_names", &KVCacheGroupSpec::layer_names, "The layers.")
      .def_property_readonly(
          "kv_cache_spec",
          [](const KVCacheGroupSpec& self) {
            return std::const_pointer_cast<KVCacheSpec>(self.kv_cache_spec);
          },
          "What each of them keeps.")
      .def_readonly("is_eagle_group", &KVCacheGroupSpec::is_eagle_group,
                    "Whether layers of a draft model are among them.")
      .def("__repr__", [](const KVCacheGroupSpec& self) {
        return concat("KVCacheGroupSpec(", self.layer_names.size(), " layers, ",
                      to_string(self.kv_cache_spec->kind()), ")");
      });
}

void bind_tensor(py::module_& m) {
  py::class_<KVCacheTensor>(m, "KVCacheTensor",
                            R"(Where layers of one shape lie in the memory of the cache.

Block ``b`` of ``layers[l]`` begins at byte ``offset + l * layer_stride + b * block_stride``.

Args:
    size: Bytes of the whole allocation.
    layers: Names of the layers.
    layer_stride: Bytes from a layer to the next.
    block_stride: Bytes from a block to the next.
    offset: Where block 0 of the first layer begins, in bytes.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::KVCacheTensor.
)")
      .def(py::init([](std::int64_t size, std::vector<std::string> layers,
                       std::int64_t layer_stride, std::int64_t block_stride, std::int64_t offset) {
             return KVCacheTensor{size, std::move(layers), layer_stride, block_stride, offset};
           }),
           py::arg("size").noconvert(), py::arg("layers"), py::arg("layer_stride").noconvert(),
           py::arg("block_stride").noconvert(), py::arg("offset").noconvert() = 0)
      .def_readonly("size", &KVCacheTensor::size, "Bytes of the whole allocation.")
      .def_readonly("layers", &KVCacheTensor::layers, "Names of the layers.")
      .def_readonly("layer_stride", &KVCacheTensor::layer_stride, "Bytes from a layer to the next.")
      .def_readonly("block_stride", &KVCacheTensor::block_stride, "Bytes from a block to the next.")
      .def_readonly("offset", &KVCacheTensor::offset, "Where the first layer begins, in bytes.")
      .def("__repr__", [](const KVCacheTensor& self) {
        return concat("KVCacheTensor(size=", self.size, ", ", self.layers.size(), " layers)");
      });
}

}  // namespace

void bind_config(py::module_& m) {
  bind_group_spec(m);
  bind_tensor(m);
  py::class_<KVCacheConfig>(m, "KVCacheConfig",
                            R"(How the layers of a model share one pool of blocks.

Args:
    num_blocks: Blocks of the pool, the null block included.
    kv_cache_tensors: Where the layers lie in memory; not read by `KVCacheManager`.
    kv_cache_groups: The groups of layers.
    prefix_cache_retention_interval: Which blocks of sliding-window groups are cached. None: all
        that a hit can need; 0: only those that a repeated prompt needs; n, a multiple of the
        scheduler's block size: also those before every n-th token.

Source:
    vLLM 0.32 v1/kv_cache_interface.py::KVCacheConfig.
)")
      .def(py::init([](std::int64_t num_blocks, std::vector<KVCacheTensor> kv_cache_tensors,
                       std::vector<KVCacheGroupSpec> kv_cache_groups,
                       std::optional<std::int64_t> prefix_cache_retention_interval) {
             return KVCacheConfig{num_blocks, std::move(kv_cache_tensors),
                                  std::move(kv_cache_groups), prefix_cache_retention_interval};
           }),
           py::arg("num_blocks").noconvert(), py::arg("kv_cache_tensors"),
           py::arg("kv_cache_groups"),
           py::arg("prefix_cache_retention_interval").noconvert() = py::none())
      .def_readonly("num_blocks", &KVCacheConfig::num_blocks,
                    "Blocks of the pool, the null block included.")
      .def_readonly("kv_cache_tensors", &KVCacheConfig::kv_cache_tensors,
                    "Where the layers lie in memory.")
      .def_readonly("kv_cache_groups", &KVCacheConfig::kv_cache_groups, "The groups of layers.")
      .def_readonly("prefix_cache_retention_interval",
                    &KVCacheConfig::prefix_cache_retention_interval,
                    "Which blocks of sliding-window groups are cached.")
      .def("__repr__", [](const KVCacheConfig& self) {
        return concat("KVCacheConfig(num_blocks=", self.num_blocks, ", ",
                      self.kv_cache_groups.size(), " groups)");
      });
}

}  // namespace paged_kv::bindings
