// SPDX-License-Identifier: Apache-2.0
// Many copies by the copy engines, in one call if the toolkit supports it.
#pragma once

#include <cuda_runtime_api.h>

#include "plan.h"

namespace kvlc {

// Enqueue `count` runs, in no particular order, of a payload on the device or the host. Throws.
void copy_runs(const Run *runs, size_t count, bool gather, bool on_device, cudaStream_t stream);

}  // namespace kvlc
