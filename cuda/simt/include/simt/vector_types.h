// SPDX-License-Identifier: Apache-2.0
//
// CUDA's built-in vector types and dim3: same members, sizes and alignments.
#pragma once

#include <cstdint>

#define PAGED_KV_SIMT_VECTOR(Base, name, align2, align4)                      \
  struct name##1 { Base x; };                                                 \
  struct alignas(align2) name##2 { Base x, y; };                              \
  struct name##3 { Base x, y, z; };                                           \
  struct alignas(align4) name##4 { Base x, y, z, w; };                        \
  inline name##2 make_##name##2(Base x, Base y) { return {x, y}; }            \
  inline name##3 make_##name##3(Base x, Base y, Base z) { return {x, y, z}; } \
  inline name##4 make_##name##4(Base x, Base y, Base z, Base w) { return {x, y, z, w}; }

PAGED_KV_SIMT_VECTOR(signed char, char, 2, 4)
PAGED_KV_SIMT_VECTOR(unsigned char, uchar, 2, 4)
PAGED_KV_SIMT_VECTOR(short, short, 4, 8)
PAGED_KV_SIMT_VECTOR(unsigned short, ushort, 4, 8)
PAGED_KV_SIMT_VECTOR(int, int, 8, 16)
PAGED_KV_SIMT_VECTOR(unsigned int, uint, 8, 16)
PAGED_KV_SIMT_VECTOR(float, float, 8, 16)
PAGED_KV_SIMT_VECTOR(long long, longlong, 16, 16)
PAGED_KV_SIMT_VECTOR(unsigned long long, ulonglong, 16, 16)
PAGED_KV_SIMT_VECTOR(double, double, 16, 16)
#undef PAGED_KV_SIMT_VECTOR

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
      : x(x_), y(y_), z(z_) {}
};
