// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"

#include <dlfcn.h>
#include <stdexcept>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace paged_kv::cuda {

#if defined(PAGED_KV_EMULATED_OPS)

CurrentStream::CurrentStream(const Tensor&) {}

#else

namespace {

using GetCurrentStream = AOTITorchError (*)(std::int32_t device_index, void** stream);

// Looked up and not linked: this library also serves a torch without CUDA, which lacks the symbol.
// Nor can it be a weak reference: torch's libraries are loaded RTLD_LOCAL, so that would stay null.
GetCurrentStream find_get_current_stream() {
  constexpr const char* kLibrary = "libtorch_cuda.so";
  constexpr const char* kSymbol = "aoti_torch_get_current_cuda_stream";
  void* library = dlopen(kLibrary, RTLD_NOLOAD | RTLD_NOW);
  void* symbol = library == nullptr ? nullptr : dlsym(library, kSymbol);
  if (symbol == nullptr) {
    throw std::runtime_error(concat("no CUDA stream: ", kSymbol, " was not found in ", kLibrary,
                                    library == nullptr
                                        ? ", which is not loaded: this torch was built without CUDA"
                                        : ": paged_kv needs torch >= 2.10"));
  }
  return reinterpret_cast<GetCurrentStream>(symbol);
}

}  // namespace

CurrentStream::CurrentStream(const Tensor& tensor) : guard_(tensor.get_device_index()) {
  static const GetCurrentStream get_current_stream = find_get_current_stream();
  void* stream = nullptr;
  if (get_current_stream(tensor.get_device_index(), &stream) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("torch could not name its current CUDA stream");
  }
  stream_ = static_cast<cudaStream_t>(stream);
}

#endif

}  // namespace paged_kv::cuda
