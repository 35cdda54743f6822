// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>

#include "batch.h"
#include "kernel.h"

namespace kvlc {
namespace {

// A stream that waits for a captured stream is captured, too, and would copy nothing.
void refuse_capture(cudaStream_t caller_stream) {
    cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(caller_stream, &state), "cudaStreamIsCapturing");
    if (state != cudaStreamCaptureStatusNone)
        kvl::fail(KVL_EARGUMENT, "the stream is being captured into a graph; copy outside of it");
}

}  // namespace

Transfer::Transfer(Device &device, const Plan &plan, ptrdiff_t shift, cudaStream_t caller_stream,
                   unsigned flags)
    : device_(device), stream_(device.stream(plan.gather(), caller_stream)), flags_(flags),
      copies_(plan.copies()), staging_(device.acquire_staging(plan.staged_nbytes())) {
    try {
        if (staging_.nbytes) plan.stage(staging_.host, staging_.device, shift);
        enqueue(plan, caller_stream);
    } catch (...) {
        release();
        throw;
    }
}

Transfer::~Transfer() { release(); }

void Transfer::enqueue(const Plan &plan, cudaStream_t caller_stream) {
    if (plan.groups().empty()) return;
    refuse_capture(caller_stream);
    follow(caller_stream, stream_);
    try {
        if (staging_.nbytes)
            check(cudaMemcpyAsync(staging_.device, staging_.host, plan.staged_nbytes(),
                                  cudaMemcpyHostToDevice, stream_),
                  "cudaMemcpyAsync");
        for (const Group &group : plan.groups()) {
            enqueue_group(plan, group);
            record_event();
            stops_.push_back(group.stop);
        }
        if (!plan.gather())
            check(cudaStreamWaitEvent(caller_stream, events_.back(), 0), "cudaStreamWaitEvent");
    } catch (...) {
        record_event();  // after what was enqueued: `release` waits for it
        throw;
    }
}

void Transfer::enqueue_group(const Plan &plan, const Group &group) {
    uint64_t tasks = group.stop_task - group.first_task;
    if (tasks) {
        auto at = reinterpret_cast<const Task *>(staging_.device) + group.first_task;
        auto blocks = static_cast<unsigned>(std::min<uint64_t>(device_.blocks(), group.tiles));
        check(launch(plan.gather(), at, tasks, group.tiles, blocks, stream_),
              "launching the copying kernel");
    }
    copy_runs(plan.runs().data() + group.first_run, group.stop_run - group.first_run, plan.gather(),
              stream_);
}

void Transfer::follow(cudaStream_t first, cudaStream_t then) {
    cudaEvent_t reached;
    check(cudaEventCreateWithFlags(&reached, cudaEventDisableTiming), "cudaEventCreate");
    cudaError_t status = cudaEventRecord(reached, first);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(then, reached, 0);
    (void)cudaEventDestroy(reached);  // CUDA keeps it for as long as a stream waits for it
    check(status, "following the caller's stream");
}

void Transfer::record_event() {
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, flags_), "cudaEventCreate");
    events_.push_back(event);
    check(cudaEventRecord(event, stream_), "cudaEventRecord");
}

void Transfer::wait(uint64_t copy) const {
    auto group = std::upper_bound(stops_.begin(), stops_.end(), copy) - stops_.begin();
    if (stops_.empty()) return;
    group = std::min<ptrdiff_t>(group, ptrdiff_t(stops_.size()) - 1);
    check(cudaEventSynchronize(events_[size_t(group)]), "copying");
}

void Transfer::wait_all() const { wait(UINT64_MAX); }

uint64_t Transfer::complete() const {
    uint64_t done = 0;
    for (size_t group = 0; group < stops_.size(); group++) {
        cudaError_t status = cudaEventQuery(events_[group]);
        if (status == cudaErrorNotReady) {
            (void)cudaGetLastError();
            return done;
        }
        check(status, "copying");
        done = stops_[group];
    }
    return copies_;
}

void Transfer::release() {
    if (!events_.empty()) (void)cudaEventSynchronize(events_.back());
    for (cudaEvent_t event : events_) (void)cudaEventDestroy(event);
    events_.clear();
    device_.release_staging(staging_);
    staging_ = {};
}

}  // namespace kvlc
