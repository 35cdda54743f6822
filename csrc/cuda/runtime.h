// CUDA's statuses as failures, and its notion of a thread's current device.
#pragma once

#include <cuda_runtime_api.h>

#include "../failure.h"
#include "kvlink_cuda.h"

namespace kvlc {

// Throws kvl::Failure unless `status` is a success; `what` was tried.
void check(cudaError_t status, const char *what);

// Makes a device the thread's current one, and puts back what was there: a context, or none.
// cudaSetDevice alone would make a context on a device that the process does not use.
class OnDevice {
  public:
    explicit OnDevice(uint64_t number);
    ~OnDevice();
    OnDevice(const OnDevice &) = delete;
    OnDevice &operator=(const OnDevice &) = delete;

  private:
    void *before_ = nullptr;
};

}  // namespace kvlc
