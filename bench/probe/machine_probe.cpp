// SPDX-License-Identifier: Apache-2.0
//
// What this machine can do at most, for bench/machine_probe.py: reading memory, and fused
// multiply-adds. Built there with -O3 -march=native, so it uses the widest vectors of this CPU.
//
// Threads are started first and then let go together; time is from there to the end of the last.

#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Seconds that `num_threads` calls of body(thread) take side by side.
template <typename Body>
double seconds_of(int num_threads, const Body& body) {
  Clock::time_point start;
  Clock::time_point end;
  std::barrier at_start(num_threads, [&]() noexcept { start = Clock::now(); });
  std::barrier at_end(num_threads, [&]() noexcept { end = Clock::now(); });
  const auto run = [&](int thread) {
    at_start.arrive_and_wait();
    body(thread);
    at_end.arrive_and_wait();
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < num_threads; ++thread) threads.emplace_back(run, thread);
  run(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(end - start).count();
}

// As wide as a register: a compiler keeps sums of wider ones in memory.
#if defined(__AVX512F__)
constexpr std::size_t kVecBytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVecBytes = 32;
#else
constexpr std::size_t kVecBytes = 16;
#endif
typedef std::uint64_t Vec __attribute__((vector_size(kVecBytes)));

Vec load(const std::byte* from) {
  Vec value;
  std::memcpy(&value, from, kVecBytes);
  return value;
}

// Sums all of it but a rest of under kStep bytes. Four sums: an add must not wait for the last one.
std::uint64_t sum_bytes(const std::byte* begin, std::int64_t num_bytes) {
  constexpr std::int64_t kStep = 256;
  constexpr std::int64_t kVec = kVecBytes;
  Vec a = {}, b = {}, c = {}, d = {};
  const std::byte* const end = begin + num_bytes / kStep * kStep;
  for (const std::byte* from = begin; from < end; from += kStep) {
    for (std::int64_t i = 0; i < kStep; i += 4 * kVec) {
      a += load(from + i);
      b += load(from + i + kVec);
      c += load(from + i + 2 * kVec);
      d += load(from + i + 3 * kVec);
    }
  }
  const Vec sum = (a + b) + (c + d);
  std::uint64_t result = 0;
  for (std::size_t i = 0; i < kVecBytes / sizeof(std::uint64_t); ++i) result += sum[i];
  return result;
}

// The loop is written in assembly where a compiler may not choose to keep a sum in memory.
// 12 sums: latency 4-5 cycles x 2 units, with some to spare.
#define PAGED_KV_FMA(reg, n) "vfmadd231ps %%" reg "14, %%" reg "15, %%" reg #n "\n\t"
#define PAGED_KV_FMA_LOOP(reg) \
  "1:\n\t" PAGED_KV_FMA(reg, 0) PAGED_KV_FMA(reg, 1) PAGED_KV_FMA(reg, 2)         \
      PAGED_KV_FMA(reg, 3) PAGED_KV_FMA(reg, 4) PAGED_KV_FMA(reg, 5)              \
      PAGED_KV_FMA(reg, 6) PAGED_KV_FMA(reg, 7) PAGED_KV_FMA(reg, 8)              \
      PAGED_KV_FMA(reg, 9) PAGED_KV_FMA(reg, 10) PAGED_KV_FMA(reg, 11) "decq %0\n\t" \
      "jnz 1b\n\t"
#define PAGED_KV_CLOBBERS                                                                        \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm14", "xmm15"

// `num_steps` times kFmasPerStep multiply-adds of floats. What is in the registers does not matter:
// all are zeroed, as a multiply-add of denormal numbers may be slow.
#if defined(__AVX512F__)
constexpr std::int64_t kFmasPerStep = 12 * 16;
void multiply_add(std::int64_t num_steps) {
  asm volatile("vzeroall\n\t" PAGED_KV_FMA_LOOP("zmm") : "+r"(num_steps)::PAGED_KV_CLOBBERS);
}
#elif defined(__AVX2__) && defined(__FMA__)
constexpr std::int64_t kFmasPerStep = 12 * 8;
void multiply_add(std::int64_t num_steps) {
  asm volatile("vzeroall\n\t" PAGED_KV_FMA_LOOP("ymm") : "+r"(num_steps)::PAGED_KV_CLOBBERS);
}
#else
#if defined(__aarch64__)
#define PAGED_KV_IN_REGISTER "+w"
#elif defined(__x86_64__)
#define PAGED_KV_IN_REGISTER "+x"
#else
#define PAGED_KV_IN_REGISTER "+m"
#endif
constexpr int kNumSums = 8;
constexpr std::int64_t kFmasPerStep = kNumSums * 4;
void multiply_add(std::int64_t num_steps) {
  typedef float Floats __attribute__((vector_size(16)));
  Floats sums[kNumSums] = {};
  const Floats factor = {0.5f, 0.5f, 0.5f, 0.5f};  // 1 would be no multiplication
  for (std::int64_t i = 0; i < num_steps; ++i) {
    for (Floats& sum : sums) {
      sum = sum * factor + factor;
      asm volatile("" : PAGED_KV_IN_REGISTER(sum));  // so that no step is left out
    }
  }
}
#endif

}  // namespace

extern "C" {

// Seconds in which `num_threads` threads read all buffers `repeats` times: each thread its share
// of every buffer, from front to back.
double paged_kv_probe_read(const std::byte* const* buffers, const std::int64_t* num_bytes,
                           int num_buffers, int num_threads, int repeats) {
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(num_threads));
  const double seconds = seconds_of(num_threads, [&](int thread) {
    std::uint64_t sum = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (int i = 0; i < num_buffers; ++i) {
        const std::int64_t share = num_bytes[i] / num_threads;
        sum += sum_bytes(buffers[i] + thread * share, share);
      }
    }
    sums[static_cast<std::size_t>(thread)] = sum;
  });
  volatile std::uint64_t sink = 0;
  for (const std::uint64_t sum : sums) sink = sink + sum;
  return seconds;
}

// Seconds in which each of `num_threads` threads makes `num_steps` steps of multiply_add().
double paged_kv_probe_fma(std::int64_t num_steps, int num_threads) {
  return seconds_of(num_threads, [&](int) { multiply_add(num_steps); });
}

// Operations of one step: a multiply-add is two.
std::int64_t paged_kv_probe_flops_per_step() { return 2 * kFmasPerStep; }
}
