// SPDX-License-Identifier: Apache-2.0
//
// The running block: its threads as fibers, and who goes on when.
//
// A thread runs until it waits (barrier, warp collective) or returns; then it switches straight to
// the next ready thread. Blocks run one after the other.
#pragma once

#include "fiber.h"
#include "memory.h"
#include "ready_queue.h"
#include "shared_arena.h"
#include "simt/async_copy.h"
#include "simt/barrier.h"
#include "simt/host_api.h"
#include "simt/options.h"
#include "simt/thread.h"
#include "simt/warp.h"
#include "tokens.h"

#include <array>
#include <cstdint>
#include <exception>
#include <vector>

namespace paged_kv::simt {

inline constexpr int kMaxWarps = kMaxThreadsPerBlock / warpSize;

// Tokens of a block: of the barrier, by the parity of its generation (a thread that runs ahead to
// the next barrier must not be ordered with those behind the last one); then of each warp, by the
// lowest lane of the mask and by turns.
inline constexpr int kNumBarrierTokens = 2;
inline constexpr int kNumTurns = 4;
inline constexpr int kNumTokens = kNumBarrierTokens + kMaxThreadsPerBlock * kNumTurns;

enum class Activity : std::uint8_t { kRunning, kAtBarrier, kInWarpOp, kReturned };

// cp.async of one thread, oldest first.
struct AsyncCopyQueue {
  static constexpr int kCapacity = 256;
  struct Entry {
    AsyncCopy copy;
    int group;
  };
  std::array<Entry, kCapacity> entries;
  int first = 0;
  int count = 0;
  int num_committed_groups = 0;
};

// kRunning is running or ready. A waiting thread's fields tell where; whoever releases it resets
// `activity`, so that a check never sees a wait that is over.
struct Thread : ThreadContext {
  Fiber fiber;
  int index = 0;
  Activity activity = Activity::kRunning;
  const char* waits_in = nullptr;   // name of the CUDA function
  const WarpOp* warp_op = nullptr;  // if kInWarpOp, with `mask`
  unsigned mask = 0;
  Location location{};
  AsyncCopyQueue copies;
  bool has_fenced = false;  // see memory_fence()
  const void* last_atomic = nullptr;
};

struct Warp {
  WarpExchange exchange;
  unsigned live = 0;     // lanes that exist and have not returned
  unsigned waiting = 0;  // of those, the ones whose activity is kInWarpOp
  // Completed collectives by the lowest lane of their mask; numbers the tokens.
  std::array<unsigned, warpSize> num_completed;
};

struct Barrier {
  int num_waiting = 0;
  unsigned generation = 0;
  const char* name = nullptr;  // what the first thread to arrive called, and where
  Location location{};
  BarrierVotes votes{};
  // Of the generations with this parity. A thread can be one generation ahead, not two.
  std::array<BarrierVotes, 2> results{};
};

class Block {
 public:
  Block();

  // Before the blocks of a grid: takes stacks and the schedule of options().
  void begin_launch(int num_threads, std::size_t dynamic_shared_bytes);
  void end_launch();
  // Runs all threads of one block to their end. Throws what a kernel threw; then the other threads
  // are abandoned where they wait, without unwinding.
  void run(const BlockContext& context, KernelCall call, RandomSequence random);

  [[nodiscard]] int num_threads() const noexcept { return num_threads_; }
  [[nodiscard]] const Thread& thread(int index) const { return threads_[to_index(index)]; }
  [[nodiscard]] Thread& running() const noexcept { return static_cast<Thread&>(*current_thread); }
  [[nodiscard]] SharedArena& shared() noexcept { return shared_; }
  [[nodiscard]] const Tokens& tokens() const noexcept { return tokens_; }
  [[nodiscard]] const Options& schedule() const noexcept { return schedule_; }

  // What the running thread calls; barrier.cpp, warp.cpp.
  BarrierVotes wait_at_barrier(bool predicate, const char* name, Location location);
  void exchange_in_warp(unsigned mask, const WarpOp& op, void* operand, std::size_t num_bytes,
                        int source_lane, Location location);

 private:
  static std::size_t to_index(int value) noexcept { return static_cast<std::size_t>(value); }
  static void thread_entry();

  void prepare_threads();
  void resume(int index, Fiber& from, bool from_ends);
  // The running thread gives its turn away until it is made ready and chosen again.
  void wait_for_turn();
  void make_ready(Thread& thread);
  [[noreturn]] void leave_returned_thread();
  void complete_barrier_if_full();
  void complete_warp_op_if_full(int warp, unsigned mask);
  void complete_warp_ops_of(int warp);

  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Barrier barrier_;
  ReadyQueue ready_;
  StackPool stacks_;
  SharedArena shared_;
  Tokens tokens_;
  Options schedule_;
  Fiber launcher_;
  KernelCall call_{};
  std::exception_ptr error_;
  std::size_t dynamic_shared_bytes_ = 0;
  int num_threads_ = 0;
  int num_live_ = 0;
};

// The only one: a process runs one launch at a time.
[[nodiscard]] Block& block();

// The error of a block that cannot go on, or that fail() found wrong.
[[nodiscard]] KernelError make_error(const Block& block, const std::string& message,
                                     Location location);

}  // namespace paged_kv::simt
