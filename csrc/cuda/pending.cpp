// SPDX-License-Identifier: Apache-2.0
#include "pending.h"

namespace kvlc {

void refuse_capture(cudaStream_t stream) {
    cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(stream, &state), "cudaStreamIsCapturing");
    if (state != cudaStreamCaptureStatusNone)
        kvl::fail(KVL_EARGUMENT, "the stream is being captured into a graph; copy outside of it");
}

bool is_over(cudaEvent_t event) {
    cudaError_t status = cudaEventQuery(event);
    if (status != cudaErrorNotReady) {
        check(status, "cudaEventQuery");
        return true;
    }
    (void)cudaGetLastError();
    return false;
}

}  // namespace kvlc
