// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

namespace kvlc {
namespace {

template <bool kGather>
__global__ void __launch_bounds__(kThreads)
    move(const Task *__restrict__ tasks, uint64_t count, uint64_t tiles) {
    for (uint64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        move_tile_of<kGather>(tasks, count, tile, threadIdx.x);
}

}  // namespace

cudaError_t launch(bool gather, const Task *tasks, uint64_t count, uint64_t tiles, unsigned blocks,
                   cudaStream_t stream) {
    if (gather)
        move<true><<<blocks, kThreads, 0, stream>>>(tasks, count, tiles);
    else
        move<false><<<blocks, kThreads, 0, stream>>>(tasks, count, tiles);
    return cudaGetLastError();
}

cudaError_t load_kernels() {
    cudaFuncAttributes found;
    cudaError_t error = cudaFuncGetAttributes(&found, move<true>);
    return error ? error : cudaFuncGetAttributes(&found, move<false>);
}

}  // namespace kvlc
