// SPDX-License-Identifier: Apache-2.0
#include "block.h"
#include "places.h"

#include <sstream>

namespace paged_kv::simt {
namespace {

template <class Vector>
void print(std::ostream& stream, const Vector& v) {
  stream << '(' << v.x << ',' << v.y << ',' << v.z << ')';
}

bool same_state(const Thread& a, const Thread& b) {
  if (a.activity != b.activity) return false;
  if (a.activity == Activity::kRunning || a.activity == Activity::kReturned) return true;
  const bool same_mask = a.activity == Activity::kAtBarrier || a.mask == b.mask;
  return same_mask && a.waits_in == b.waits_in && same_place(a.location, b.location);
}

void print_state(std::ostream& stream, const Thread& thread) {
  if (thread.activity == Activity::kRunning) {
    stream << "running or ready";
    return;
  }
  if (thread.activity == Activity::kReturned) {
    stream << "returned";
    return;
  }
  stream << "wait in " << thread.waits_in;
  if (thread.activity == Activity::kInWarpOp) stream << " mask 0x" << std::hex << thread.mask;
  stream << std::dec << ", " << to_string(thread.location) << ", "
         << thread.location.function_name();
}

}  // namespace

KernelError make_error(const Block& block, const std::string& message, Location location) {
  std::ostringstream stream;
  stream << "simt: " << message;
  // Line 0: found when a thread returned that had called nothing.
  if (location.line() != 0) {
    stream << "\n  at " << to_string(location) << ", " << location.function_name();
  }
  stream << "\n  block ";
  print(stream, current_block.block_idx);
  stream << ", thread ";
  print(stream, current_thread->thread_idx);
  stream << ", " << to_string(block.schedule());
  for (int first = 0, last = 0; first < block.num_threads(); first = last) {
    while (last < block.num_threads() && same_state(block.thread(first), block.thread(last))) {
      ++last;
    }
    stream << "\n  threads " << first << ".." << last - 1 << ": ";
    print_state(stream, block.thread(first));
  }
  return KernelError(stream.str());
}

void fail(const std::string& message, Location location) {
  throw make_error(block(), message, location);
}

}  // namespace paged_kv::simt
