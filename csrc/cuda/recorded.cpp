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

void Recorded::wait() const { check(cudaEventSynchronize(event_), "cudaEventSynchronize"); }

void Recorded::digests(uint32_t *, uint64_t count) const {
    if (count) kvl::fail(KVL_EARGUMENT, "a ticket of kvlc_record has no digests");
}

void Recorded::hold_back(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent");
}

}  // namespace kvlc
