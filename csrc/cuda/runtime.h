// SPDX-License-Identifier: Apache-2.0
// CUDA's statuses as failures, and a thread's current device.
#pragma once

#include <cuda_runtime_api.h>

#include "../failure.h"
#include "kvlink_cuda.h"

namespace kvlc {

// Throws kvl::Failure unless `status` is a success; `what` names the call.
void check(cudaError_t status, const char *what);

// Makes a device the thread's current one, and restores the previous context, or none:
// cudaSetDevice could only restore a device, and would create a context on it. Within it the thread
// may also make the calls that CUDA refuses to all threads while one of them captures a graph.
class OnDevice {
  public:
    explicit OnDevice(uint64_t number);
    ~OnDevice();
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;

  private:
    void *before_ = nullptr;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then: the one before
};

}  // namespace kvlc
