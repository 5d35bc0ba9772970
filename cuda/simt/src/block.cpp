// SPDX-License-Identifier: Apache-2.0
#include "block.h"

#include "sanitizers.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace paged_kv::simt {
namespace {

constexpr std::size_t kDefaultStackBytes = sanitizer::kAddress ? 256 * 1024 : 64 * 1024;

// "block (0,2,0) thread (31,0,0)"
std::string name_of(const ThreadContext& thread) {
  const auto text = [](auto v) {
    return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
  };
  return "block " + text(current_block.block_idx) + " thread " + text(thread.thread_idx);
}

}  // namespace

ThreadContext* current_thread = nullptr;
uint3 current_thread_idx{};
BlockContext current_block{};

Block& block() {
  static auto* instance = new Block;  // never destroyed: outlives every static that launches
  return *instance;
}

Block::Block() : threads_(kMaxThreadsPerBlock), warps_(kMaxWarps) {
  for (int i = 0; i < kMaxThreadsPerBlock; ++i) {
    threads_[to_index(i)].index = i;
    threads_[to_index(i)].lane = i % warpSize;
  }
}

void Block::begin_launch(int num_threads, std::size_t dynamic_shared_bytes) {
  schedule_ = options();
  num_threads_ = num_threads;
  dynamic_shared_bytes_ = dynamic_shared_bytes;
  stacks_.reserve(num_threads,
                  schedule_.stack_bytes > 0 ? to_index(schedule_.stack_bytes) : kDefaultStackBytes);
  tokens_.begin_launch();
  launcher_.adopt_tsan_fiber();
}

void Block::end_launch() { tokens_.acquire_at_launch_end(); }

void Block::run(const BlockContext& context, KernelCall call, RandomSequence random) {
  current_block = context;
  call_ = call;
  error_ = nullptr;
  shared_.begin_block(dynamic_shared_bytes_, to_index(schedule_.max_shared_bytes));
  tokens_.begin_block(kNumTokens);
  barrier_ = Barrier{};
  for (int i = 0; i * warpSize < num_threads_; ++i) {
    const int num_lanes = std::min(num_threads_ - i * warpSize, warpSize);
    warps_[to_index(i)].live = 0xffffffffu >> (warpSize - num_lanes);
    warps_[to_index(i)].waiting = 0;
    warps_[to_index(i)].num_completed.fill(0);
  }
  ready_.reset(schedule_.order, random);
  prepare_threads();

  resume(ready_.pop(), launcher_, false);

  current_thread = nullptr;
  for (int i = 0; i < num_threads_; ++i) threads_[to_index(i)].fiber.destroy_tsan_fiber();
  if (error_ == nullptr) return;
  stacks_.unpoison_all();
  std::rethrow_exception(error_);
}

void Block::prepare_threads() {
  const dim3 dim = current_block.block_dim;
  uint3 idx{0, 0, 0};
  num_live_ = num_threads_;
  for (int i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[to_index(i)];
    thread.thread_idx = idx;
    thread.activity = Activity::kRunning;
    thread.location = Location{};
    thread.copies.first = thread.copies.count = thread.copies.num_committed_groups = 0;
    thread.has_fenced = false;
    thread.last_atomic = nullptr;
    // Else TSan would take the frames of the last block's thread on this stack for shared memory.
    if (sanitizer::kThread) MappedMemory::forget(stacks_.stack(i));
    thread.fiber.prepare(stacks_.stack(i), &Block::thread_entry);
    if (sanitizer::kThread) thread.fiber.create_tsan_fiber(name_of(thread).c_str());
    ready_.push(i);
    if (++idx.x == dim.x) {
      idx.x = 0;
      if (++idx.y == dim.y) {
        idx.y = 0;
        ++idx.z;
      }
    }
  }
}

void Block::resume(int index, Fiber& from, bool from_ends) {
  Thread& next = threads_[to_index(index)];
  current_thread = &next;
  current_thread_idx = next.thread_idx;
  Fiber::switch_to(from, next.fiber, from_ends);
}

void Block::make_ready(Thread& thread) {
  thread.activity = Activity::kRunning;
  ready_.push(thread.index);
}

void Block::wait_for_turn() {
  Thread& self = running();
  if (ready_.empty()) {
    throw make_error(*this, "deadlock: no thread of the block can go on", self.location);
  }
  const int next = ready_.pop();
  if (next == self.index) return;
  tokens_.release_before_launch_end();  // it may be abandoned here
  resume(next, self.fiber, false);
}

void Block::thread_entry() {
  Block& self = block();
  Fiber::arrive(self.running().fiber);
  try {
    self.call_.invoke(self.call_.arguments);
    commit_async_copies();
    for (AsyncCopy copy; next_due_async_copy(0, &copy);) perform_async_copy(copy);
  } catch (...) {
    self.error_ = std::current_exception();
  }
  self.leave_returned_thread();
}

// A thread that has returned counts no longer: its block's barrier, or a collective of its warp,
// may now be complete.
void Block::leave_returned_thread() {
  Thread& self = running();
  self.activity = Activity::kReturned;
  warps_[to_index(self.index / warpSize)].live &= ~(1u << self.lane);
  --num_live_;
  if (error_ == nullptr) {
    try {
      complete_barrier_if_full();
      complete_warp_ops_of(self.index / warpSize);
      if (num_live_ == 0) shared_.check_guards(self.location);
      if (num_live_ > 0 && ready_.empty()) {
        throw make_error(*this, "deadlock: no thread of the block can go on", self.location);
      }
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  tokens_.release_before_launch_end();
  if (error_ != nullptr || num_live_ == 0) {
    Fiber::switch_to(self.fiber, launcher_, true);
  } else {
    resume(ready_.pop(), self.fiber, true);
  }
  std::abort();  // not reached: nobody resumes a fiber that has ended
}

}  // namespace paged_kv::simt
