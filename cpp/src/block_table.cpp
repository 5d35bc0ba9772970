// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/math.h"
