// SPDX-License-Identifier: Apache-2.0
//
// What one operation of the host core costs in a pool of a given size: run by host_costs.py, which
// says what is measured.
//
//   paged_kv_host_costs OPERATION NUM_BLOCKS in-order|shuffled NUM_OPERATIONS NUM_ROUNDS
//
// prints the nanoseconds per operation of each round. Nothing else runs inside measured_round(), so
// that callgrind can be told to count there only.
#include "paged_kv/check.h"
#include "paged_kv/kv_cache_manager.h"

#include <algorithm>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace paged_kv {
namespace {

constexpr std::int32_t kBlockSize = 16;

// Prepares one round, and runs it.
struct Operation {
  std::function<void()> prepare;
  std::function<void()> run;
};

// Leaves the free queue in a random order.
void shuffle_free_queue(BlockPool& pool) {
  std::vector<BlockId> blocks = pool.get_new_blocks(pool.get_num_free_blocks());
  std::ranges::shuffle(blocks, std::mt19937(0));
  pool.free_blocks(blocks);
}

// One block a call: taken by `take`, given back by `give_back`.
class TakenBlocks {
 public:
  TakenBlocks(std::int32_t num_blocks, bool is_shuffled, std::size_t num_operations)
      : pool_(num_blocks, /*enable_caching=*/true, kBlockSize), num_operations_(num_operations) {
    if (is_shuffled) shuffle_free_queue(pool_);
    taken_.reserve(num_operations);
  }

  void take() {
    for (std::size_t i = 0; i < num_operations_; ++i) pool_.append_new_blocks(1, taken_);
  }
  void give_back() {
    for (const BlockId& block : taken_) pool_.free_blocks({&block, 1});
    taken_.clear();
  }

 private:
  BlockPool pool_;
  std::size_t num_operations_;
  std::vector<BlockId> taken_;
};

Operation alloc(std::int32_t num_blocks, bool is_shuffled, std::size_t num_operations) {
  const auto blocks = std::make_shared<TakenBlocks>(num_blocks, is_shuffled, num_operations);
  return {[blocks] { blocks->give_back(); }, [blocks] { blocks->take(); }};
}

Operation free(std::int32_t num_blocks, bool is_shuffled, std::size_t num_operations) {
  const auto blocks = std::make_shared<TakenBlocks>(num_blocks, is_shuffled, num_operations);
  return {[blocks] { blocks->take(); }, [blocks] { blocks->give_back(); }};
}

// A request to which tokens are appended.
class GrowingRequest {
 public:
  GrowingRequest(std::int32_t num_blocks, bool is_shuffled, std::size_t num_operations)
      : manager_(config(num_blocks), options()), num_operations_(num_operations) {
    if (is_shuffled) shuffle_free_queue(manager_.block_pool());
  }

  // Ends with a block begun, and with room in the request's arrays for what follows.
  void start() {
    if (request_) manager_.free(*request_);
    RequestOptions options;
    options.request_id = "request";
    options.prompt_token_ids.assign(num_operations_ + 2 * kBlockSize, 7);
    options.keys.cache_salt = std::to_string(++num_starts_);  // so that nothing is cached already
    request_ = std::make_unique<Request>(std::move(options),
                                         make_request_block_hasher(kBlockSize, make_none_hash()));
    allocate(request_->num_tokens());
    for (int i = 0; i < kBlockSize; ++i) append();
  }
  void grow() {
    for (std::size_t i = 0; i < num_operations_; ++i) append();
  }

 private:
  static KVCacheConfig config(std::int32_t num_blocks) {
    const AttentionFormat format{.block_size = kBlockSize,
                                 .num_kv_heads = 8,
                                 .head_size = 128,
                                 .head_size_v = 128,
                                 .dtype = "bfloat16",
                                 .page_size_padded = {}};
    KVCacheConfig config;
    config.num_blocks = num_blocks;
    config.kv_cache_groups.push_back({{"layer"}, std::make_shared<FullAttentionSpec>(format)});
    return config;
  }
  static KVCacheManagerOptions options() {
    KVCacheManagerOptions options;
    options.max_model_len = 1 << 20;
    options.scheduler_block_size = kBlockSize;
    options.hash_block_size = kBlockSize;
    return options;
  }

  void append() {
    const std::int32_t token_id = 7;
    request_->append_output_token_ids({&token_id, 1});
    allocate(1);
  }
  void allocate(std::int64_t num_tokens) {
    AllocateSlotsArgs args;
    args.num_new_tokens = num_tokens;
    if (!manager_.try_allocate_slots(*request_, args)) throw OutOfBlocksError("pool too small");
    request_->progress.num_computed_tokens += num_tokens;
  }

  KVCacheManager manager_;
  std::size_t num_operations_;
  int num_starts_ = 0;
  std::unique_ptr<Request> request_;
};

Operation append(std::int32_t num_blocks, bool is_shuffled, std::size_t num_operations) {
  const auto request = std::make_shared<GrowingRequest>(num_blocks, is_shuffled, num_operations);
  return {[request] { request->start(); }, [request] { request->grow(); }};
}

double thread_seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace
}  // namespace paged_kv

extern "C" [[gnu::noinline]] void measured_round(const std::function<void()>& run) { run(); }

int main(int argc, char** argv) {
  using namespace paged_kv;
  const std::map<std::string_view, decltype(&alloc)> operations{
      {"alloc", &alloc}, {"free", &free}, {"append", &append}};
  if (argc != 6 || !operations.contains(argv[1])) {
    std::cerr << "usage: " << argv[0] << " alloc|free|append NUM_BLOCKS in-order|shuffled "
              << "NUM_OPERATIONS NUM_ROUNDS\n";
    return 2;
  }
  const std::size_t num_operations = std::stoul(argv[4]);
  const Operation operation = operations.at(argv[1])(
      std::stoi(argv[2]), argv[3] == std::string_view("shuffled"), num_operations);
  for (int round = std::stoi(argv[5]); round > 0; --round) {
    operation.prepare();
    const double start = thread_seconds();
    measured_round(operation.run);
    const double seconds = thread_seconds() - start;
    std::cout << 1e9 * seconds / static_cast<double>(num_operations) << "\n";
  }
}
