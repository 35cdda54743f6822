// SPDX-License-Identifier: Apache-2.0
#include "recorded.h"

namespace kvlc {

Recorded::Recorded(Device &device, cudaStream_t stream) : Pending(device), stream_(stream) {
    refuse_capture(stream);
    event_ = device_.acquire_event(kEventFlags);
    cudaError_t status = cudaEventRecord(event_, stream);
    if (status != cudaSuccess) device_.release_event(event_, kEventFlags);
    check(status, "cudaEventRecord");
}

Recorded::~Recorded() { device_.release_event(event_, kEventFlags); }

void Recorded::wait(uint64_t) const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

uint64_t Recorded::complete() const {
    cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
        (void)cudaGetLastError();
        return 0;
    }
    check(status, "cudaEventQuery");
    return 1;
}

void Recorded::hold_back(cudaStream_t stream) const {
    refuse_capture(stream);
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

}  // namespace kvlc
