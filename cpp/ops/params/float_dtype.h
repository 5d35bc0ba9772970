// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace paged_kv {

// The dtypes of keys and values that are not quantised.
enum class FloatDtype { kFloat, kHalf, kBFloat16 };

}  // namespace paged_kv
