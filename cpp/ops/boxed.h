// SPDX-License-Identifier: Apache-2.0
//
// PAGED_KV_BOX(&fn): a kernel in the form that torch's stable ABI registers, like TORCH_BOX, but
// every error reaches Python as a RuntimeError with the message alone. An exception thrown by an op
// crosses libtorch unchanged and pybind11 translates it there by type: std::invalid_argument, which
// the torch-free code below throws, would come out as ValueError.
#pragma once

#include <exception>
#include <stdexcept>

#include <torch/csrc/stable/library.h>

namespace paged_kv {

template <auto kFunction, class Signature = decltype(kFunction)>
struct RuntimeErrors;

template <auto kFunction, class... Args>
struct RuntimeErrors<kFunction, void (*)(Args...)> {
  static void call(Args... args) {
    try {
      kFunction(args...);
    } catch (const std::runtime_error&) {
      throw;
    } catch (const std::exception& error) {
      throw std::runtime_error(error.what());
    }
  }
};

}  // namespace paged_kv

#define PAGED_KV_BOX(function) TORCH_BOX(&::paged_kv::RuntimeErrors<(function)>::call)
