// Launching the copying kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "unit.h"

namespace kvlc {

// Move `tiles` tiles of tasks that lie in device memory, by `blocks` blocks.
cudaError_t launch(bool gather, const Task *tasks, uint64_t count, uint64_t tiles, unsigned blocks,
                   cudaStream_t stream);

// Load the kernels now: loading at the first launch could wait for whatever the device runs.
cudaError_t load_kernels();

}  // namespace kvlc
