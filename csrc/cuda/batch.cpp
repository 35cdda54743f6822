// SPDX-License-Identifier: Apache-2.0
#include "batch.h"

#include <atomic>

#include "runtime.h"

namespace kvlc {
namespace {

#if CUDART_VERSION >= 12080

// False once a driver has turned out to be too old for it.
std::atomic<bool> has_batch{true};

bool is_missing(cudaError_t status) {
    return status == cudaErrorNotSupported || status == cudaErrorCallRequiresNewerDriver;
}

cudaError_t enqueue_batch(std::vector<void *> &to, std::vector<void *> &from,
                          std::vector<size_t> &sizes, cudaStream_t stream) {
    cudaMemcpyAttributes how{};
    how.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    how.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(to.data(), const_cast<const void **>(from.data()), sizes.data(),
                                sizes.size(), &how, &first, 1, stream);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &how, &first, 1,
                                &failed, stream);
#endif
}

bool try_batch(const Run *runs, size_t count, bool gather, cudaStream_t stream) {
    if (count < 2 || !has_batch.load()) return false;
    std::vector<void *> to(count), from(count);
    std::vector<size_t> sizes(count);
    for (size_t i = 0; i < count; i++) {
        to[i] = gather ? runs[i].payload : runs[i].view;
        from[i] = gather ? runs[i].view : runs[i].payload;
        sizes[i] = runs[i].nbytes;
    }
    cudaError_t status = enqueue_batch(to, from, sizes, stream);
    if (is_missing(status)) {
        (void)cudaGetLastError();
        has_batch.store(false);
        return false;
    }
    check(status, "cudaMemcpyBatchAsync");
    return true;
}

#else

bool try_batch(const Run *, size_t, bool, cudaStream_t) { return false; }

#endif

}  // namespace

void copy_runs(const Run *runs, size_t count, bool gather, bool on_device, cudaStream_t stream) {
    if (try_batch(runs, count, gather, stream)) return;
    cudaMemcpyKind kind = on_device ? cudaMemcpyDeviceToDevice
                          : gather  ? cudaMemcpyDeviceToHost
                                    : cudaMemcpyHostToDevice;
    for (size_t i = 0; i < count; i++) {
        const Run &run = runs[i];
        check(cudaMemcpyAsync(gather ? run.payload : run.view, gather ? run.view : run.payload,
                              run.nbytes, kind, stream),
              "cudaMemcpyAsync");
    }
}

}  // namespace kvlc
