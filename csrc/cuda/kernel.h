// SPDX-License-Identifier: Apache-2.0
// Launching the copying kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "unit.h"

namespace kvlc {

// Copy `tiles` tiles of tasks in device memory with `blocks` blocks.
cudaError_t launch(bool gather, const Task *tasks, uint64_t count, uint64_t tiles, unsigned blocks,
                   cudaStream_t stream);

// Load the kernels now: loading at the first launch could wait for other work of the device.
cudaError_t load_kernels();

}  // namespace kvlc
