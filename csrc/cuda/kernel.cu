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

__global__ void __launch_bounds__(kThreads)
    digest(const CrcSpan *__restrict__ spans, uint64_t count, uint32_t *__restrict__ crcs,
           const CrcTables *__restrict__ given) {
    __shared__ CrcTables tables;
    auto from = reinterpret_cast<const uint32_t *>(given);
    auto to = reinterpret_cast<uint32_t *>(&tables);
    for (unsigned i = threadIdx.x; i < sizeof tables / sizeof *to; i += kThreads) to[i] = from[i];
    __syncthreads();
    for (uint64_t i = blockIdx.x; i < count; i += gridDim.x) {
        const CrcSpan span = spans[i];
        uint32_t crc = crc_part(span, tables, threadIdx.x);
        for (int lane = 16; lane; lane /= 2) crc ^= __shfl_xor_sync(~0u, crc, lane);
        if (threadIdx.x % 32 == 0) atomicXor(&crcs[span.chunk], crc_product(crc, span.shift));
    }
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

cudaError_t launch_digest(const CrcSpan *spans, uint64_t count, uint32_t *crcs,
                          const CrcTables *tables, unsigned blocks, cudaStream_t stream) {
    digest<<<blocks, kThreads, 0, stream>>>(spans, count, crcs, tables);
    return cudaGetLastError();
}

cudaError_t load_kernels() {
    cudaFuncAttributes found;
    cudaError_t error = cudaFuncGetAttributes(&found, move<true>);
    if (!error) error = cudaFuncGetAttributes(&found, move<false>);
    return error ? error : cudaFuncGetAttributes(&found, digest);
}

}  // namespace kvlc
