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

// The digests of one call, all but `results` in device memory. The registers and `done` begin
// with 0.
struct DigestCall {
    const CrcSpan *spans;
    uint32_t *registers, *done;  // one for each chunk; pieces that were digested
    uint32_t *results;           // memory of the host, as the device accesses it
    uint64_t chunks, pieces;     // of the call
    const CrcTables *tables;
};

// Digest pieces `first` to `stop`, which are of `count` spans. The last piece of a call to be
// digested writes the registers to the host: a copy engine would do so behind other calls' copies.
cudaError_t launch_digest(const DigestCall &call, uint64_t count, uint64_t first, uint64_t stop,
                          unsigned blocks, cudaStream_t stream);

// Load the kernels now: loading at the first launch could wait for other work of the device.
cudaError_t load_kernels();

}  // namespace kvlc
