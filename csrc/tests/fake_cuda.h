// What a test asks of the fake device, beyond CUDA's interface.
#pragma once

#include <cstdint>
#include <functional>

#include "fake_cuda/cuda_runtime_api.h"

struct FakeCuda {
    int devices = 1;
    bool refuses_registration = false, readonly_supported = true, has_batch = true;
    int fails_after = -1;  // launches and copies until one fails
    uint64_t launches = 0, batched = 0, copied = 0;  // copied: by calls of their own
};

FakeCuda &fake_cuda();
// Enqueue anything on a stream; null is the caller's default one.
void fake_enqueue(cudaStream_t stream, std::function<void()> work);
// Do all that the stream holds.
void fake_run(cudaStream_t stream);
