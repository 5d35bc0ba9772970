// SPDX-License-Identifier: Apache-2.0
#include "test_support.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

struct Words {
  int sum = 0, max = -5, min = 5, bits_or = 0, bits_and = -1, bits_xor = 0;
  unsigned wraps = 0, counts_down = 3, difference = 1000;
  unsigned long long wide = 0;
  float float_sum = 0;
  double double_sum = 0;
};

__global__ void all_atomics_kernel(Words* words) {
  const int thread = static_cast<int>(threadIdx.x);
  atomicAdd(&words->sum, thread);
  atomicMax(&words->max, thread);
  atomicMin(&words->min, -thread);
  atomicOr(&words->bits_or, 1 << (thread % 8));
  atomicAnd(&words->bits_and, ~(1 << (thread % 8)));
  atomicXor(&words->bits_xor, thread);
  atomicInc(&words->wraps, 4);        // 0 1 2 3 4 0 ...
  atomicDec(&words->counts_down, 3);  // 3 2 1 0 3 ...
  atomicSub(&words->difference, 2);
  atomicAdd(&words->wide, 1ull << 40);
  atomicAdd(&words->float_sum, 0.5f);
  atomicAdd(&words->double_sum, 0.25);
}

TEST(Atomic, EachFunction) {
  Words words;
  launch(&all_atomics_kernel, 1, 64, 0, nullptr, &words);
  EXPECT_EQ(words.sum, 63 * 64 / 2);
  EXPECT_EQ(words.max, 63);
  EXPECT_EQ(words.min, -63);
  EXPECT_EQ(words.bits_or, 0xff);
  EXPECT_EQ(words.bits_and, ~0xff);
  EXPECT_EQ(words.bits_xor, 0);
  EXPECT_EQ(words.wraps, 64u % 5u);
  EXPECT_EQ(words.counts_down, 3u);
  EXPECT_EQ(words.difference, 1000u - 128u);
  EXPECT_EQ(words.wide, 64ull << 40);
  EXPECT_EQ(words.float_sum, 32.0f);
  EXPECT_EQ(words.double_sum, 16.0);
}

__global__ void compare_and_swap_kernel(int* word, int* old) {
  old[threadIdx.x] =
      atomicCAS(word, static_cast<int>(threadIdx.x), static_cast<int>(threadIdx.x) + 1);
}

TEST(Atomic, CompareAndSwapReturnsTheOldValue) {
  int word = 0;
  std::array<int, 4> old{};
  launch(&compare_and_swap_kernel, 1, 4, 0, nullptr, &word, old.data());
  EXPECT_EQ(word, 4);
  EXPECT_EQ(old, (std::array{0, 1, 2, 3}));
}

__global__ void spin_lock_kernel(int* lock, int* counter) {
  // Only one thread of a warp may spin: the others could never be let in on older hardware.
  if (threadIdx.x % 32 != 0) return;
  while (atomicExch(lock, 1) != 0) __nanosleep(20);
  __threadfence();
  ++*counter;
  __threadfence();
  atomicExch(lock, 0);
}

TEST(Atomic, ExchangeWithFencesMakesALock) {
  int lock = 0;
  int counter = 0;
  launch(&spin_lock_kernel, 4, 96, 0, nullptr, &lock, &counter);
  EXPECT_EQ(counter, 12);
}

template <class T>
__global__ void add_halves_kernel(T* word) {
  atomicAdd(word, T(0.5f));
}

TEST(Atomic, HalfTypes) {
  __half half(1.0f);
  __nv_bfloat16 bfloat16(1.0f);
  launch(&add_halves_kernel<__half>, 1, 32, 0, nullptr, &half);
  launch(&add_halves_kernel<__nv_bfloat16>, 1, 32, 0, nullptr, &bfloat16);
  EXPECT_EQ(__half2float(half), 17.0f);
  EXPECT_EQ(__bfloat162float(bfloat16), 17.0f);
}

}  // namespace
}  // namespace paged_kv::cuda::testing
