// SPDX-License-Identifier: Apache-2.0
// Launching the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "crc.h"
#include "unit.h"

namespace kvlc {

// Copy `tiles` tiles of tasks in device memory with `blocks` blocks.
cudaError_t launch(bool gather, const Task *tasks, uint64_t count, uint64_t tiles, unsigned blocks,
                   cudaStream_t stream);

// XOR the registers of spans, which began with 0, to their chunks' in `crcs`. All three are in
// device memory, and the registers begin with 0.
cudaError_t launch_digest(const CrcSpan *spans, uint64_t count, uint32_t *crcs,
                          const CrcTables *tables, unsigned blocks, cudaStream_t stream);

// Load the kernels now: loading at the first launch could wait for other work of the device.
cudaError_t load_kernels();

}  // namespace kvlc
