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

// Whether a block's piece is the last one of the call; what all blocks did before is visible then.
__device__ bool is_last(const DigestCall &call) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (!threadIdx.x) last = atomicAdd(call.done, 1u) + 1 == call.pieces;
    __syncthreads();
    __threadfence();
    return last;
}

__global__ void __launch_bounds__(kThreads)
    digest(const DigestCall call, uint64_t count, uint64_t first, uint64_t stop) {
    __shared__ CrcTables tables;
    auto from = reinterpret_cast<const uint32_t *>(call.tables);
    auto to = reinterpret_cast<uint32_t *>(&tables);
    for (unsigned i = threadIdx.x; i < sizeof tables / sizeof *to; i += kThreads) to[i] = from[i];
    __syncthreads();
    for (uint64_t piece = first + blockIdx.x; piece < stop; piece += gridDim.x) {
        const CrcSpan span = span_of(call.spans, count, piece);
        uint32_t crc = crc_piece(span, piece, tables, threadIdx.x);
        for (int lane = 16; lane; lane /= 2) crc ^= __shfl_xor_sync(~0u, crc, lane);
        if (threadIdx.x % 32 == 0)
            atomicXor(&call.registers[span.chunk],
                      crc_product(crc, crc_shift(span, piece, tables)));
        if (is_last(call))
            for (uint64_t i = threadIdx.x; i < call.chunks; i += kThreads)
                call.results[i] = __ldcg(&call.registers[i]);
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

cudaError_t launch_digest(const DigestCall &call, uint64_t count, uint64_t first, uint64_t stop,
                          unsigned blocks, cudaStream_t stream) {
    digest<<<blocks, kThreads, 0, stream>>>(call, count, first, stop);
    return cudaGetLastError();
}

cudaError_t load_kernels() {
    cudaFuncAttributes found;
    cudaError_t error = cudaFuncGetAttributes(&found, move<true>);
    if (!error) error = cudaFuncGetAttributes(&found, move<false>);
    return error ? error : cudaFuncGetAttributes(&found, digest);
}

}  // namespace kvlc
