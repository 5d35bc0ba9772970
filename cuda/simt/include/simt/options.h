// SPDX-License-Identifier: Apache-2.0
//
// How an emulated launch schedules threads, and what device it plays.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace paged_kv::simt {

// The order in which the ready threads of a block (and the blocks of a grid) get their turn. A
// correct kernel gives bit-identical results under all of them.
enum class ThreadOrder { kFifo, kLifo, kRandom };

// When the bytes of a cp.async move: at the wait that covers it (finds a missing wait), or at once
// (finds a write into a stage that is still being read).
enum class AsyncCopyMode { kLate, kEager };

struct Options {
  ThreadOrder order = ThreadOrder::kFifo;
  std::uint64_t seed = 1;  // for kRandom
  AsyncCopyMode async_copy = AsyncCopyMode::kLate;
  int stack_bytes = 0;                // per thread; 0: 64 KiB, under ASan 256 KiB
  int max_shared_bytes = 227 * 1024;  // per block, static + dynamic, after opt-in (sm_90)
  int num_multiprocessors = 132;      // what cudaDeviceGetAttribute answers
};

// Of this process; read at each launch. At first use taken from the environment (a bad value throws
// std::invalid_argument): PAGED_KV_SIMT_ORDER = fifo | lifo | random, PAGED_KV_SIMT_SEED,
// PAGED_KV_SIMT_ASYNC_COPY = late | eager, PAGED_KV_SIMT_STACK_KB, PAGED_KV_SIMT_MAX_SHARED_KB.
[[nodiscard]] Options& options();

// Sets options() for the lifetime of this object.
class ScopedOptions {
 public:
  explicit ScopedOptions(const Options& value) : saved_(options()) { options() = value; }
  ~ScopedOptions() { options() = saved_; }
  ScopedOptions(const ScopedOptions&) = delete;
  ScopedOptions& operator=(const ScopedOptions&) = delete;

 private:
  Options saved_;
};

// The schedules under which a kernel must agree with itself: {fifo, lifo, random with each of
// `num_seeds` seeds} x {late, eager}.
[[nodiscard]] std::vector<Options> all_schedules(int num_seeds = 2);

// For messages: "order=random seed=2 async_copy=eager".
[[nodiscard]] std::string to_string(const Options& value);

}  // namespace paged_kv::simt
