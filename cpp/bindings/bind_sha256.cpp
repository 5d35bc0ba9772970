// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/sha256.h"

#include <optional>
#include <string>

namespace paged_kv::bindings {
namespace {

constexpr Sha256Backend kBackends[] = {Sha256Backend::kPortable, Sha256Backend::kShaNi};

// The one in use first.
std::vector<std::string> sha256_backends() {
  const Sha256Backend in_use = default_sha256_backend();
  std::vector<std::string> names{std::string(name_of(in_use))};
  for (const Sha256Backend backend : kBackends) {
    if (backend != in_use && is_supported(backend)) names.emplace_back(name_of(backend));
  }
  return names;
}

Sha256Backend parse_backend(const std::optional<std::string>& name) {
  if (!name) return default_sha256_backend();
  for (const Sha256Backend backend : kBackends) {
    if (*name == name_of(backend) && is_supported(backend)) return backend;
  }
  throw py::value_error("backend: expected one of " +
                        std::string(py::str(py::cast(sha256_backends()))) + ", got '" + *name +
                        "'");
}

}  // namespace

void bind_sha256(py::module_& m) {
  m.def("sha256_backends", &sha256_backends,
        R"(Implementations of SHA-256 that this CPU can run, the one in use first.

``sha-ni`` uses the CPU's SHA instructions. The environment variable PAGED_KV_PORTABLE_SHA256=1 turns
to ``portable``; it is read once, at the first hash. Both give the same digests.
)");
  m.def(
      "sha256",
      [](const py::bytes& message, const std::optional<std::string>& backend) {
        return to_bytes(sha256(as_byte_span(message), parse_backend(backend)));
      },
      py::arg("message"), py::arg("backend") = py::none(),
      R"(SHA-256 of `message`, 32 bytes, for tests of the backends.

Raises:
    ValueError: a backend that is not in `sha256_backends()`.

Example:
    >>> sha256(b"abc").hex()[:8]
    'ba7816bf'
)");
}

}  // namespace paged_kv::bindings
