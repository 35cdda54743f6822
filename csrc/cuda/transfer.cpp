// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>

#include "batch.h"
#include "kernel.h"
#include "recorded.h"

namespace kvlc {

Transfer::Transfer(Device &device, const Plan &plan, Placement payload, Predecessor before,
                   unsigned flags)
    : Pending(device), stream_(device.stream(plan.gather(), before.stream)),
      on_device_(payload.on_device), flags_(flags), copies_(plan.copies()),
      staging_(device.acquire_staging(plan.staged_nbytes())) {
    try {
        if (staging_.nbytes) plan.stage(staging_.host, staging_.device, payload.shift);
        enqueue(plan, before);
    } catch (...) {
        release();
        throw;
    }
}

Transfer::~Transfer() { release(); }

void Transfer::enqueue(const Plan &plan, Predecessor before) {
    if (plan.groups().empty()) return;
    events_.reserve(plan.groups().size());
    try {
        follow(before);
        if (staging_.nbytes)
            check(cudaMemcpyAsync(staging_.device, staging_.host, plan.staged_nbytes(),
                                  cudaMemcpyHostToDevice, stream_),
                  "cudaMemcpyAsync");
        for (const Group &group : plan.groups()) {
            enqueue_group(plan, group);
            record_event();
            stops_.push_back(group.stop);
        }
        if (!plan.gather() && !before.recorded) hold_back(before.stream);
    } catch (...) {
        // An event after what was enqueued may fail, too.
        (void)cudaStreamSynchronize(stream_);
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
              on_device_, stream_);
}

void Transfer::follow(Predecessor before) {
    if (before.recorded)
        before.recorded->hold_back(stream_);
    else
        Recorded(device_, before.stream).hold_back(stream_);
}

void Transfer::record_event() {
    events_.push_back(device_.acquire_event(flags_));
    check(cudaEventRecord(events_.back(), stream_), "cudaEventRecord");
}

void Transfer::hold_back(cudaStream_t stream) const {
    if (events_.empty()) return;
    refuse_capture(stream);
    check(cudaStreamWaitEvent(stream, events_.back(), 0), "cudaStreamWaitEvent");
}

void Transfer::wait(uint64_t copy) const {
    auto group = std::upper_bound(stops_.begin(), stops_.end(), copy) - stops_.begin();
    if (stops_.empty()) return;
    group = std::min<ptrdiff_t>(group, ptrdiff_t(stops_.size()) - 1);
    check(cudaEventSynchronize(events_[size_t(group)]), "copying");
}

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
    for (cudaEvent_t event : events_) device_.release_event(event, flags_);
    events_.clear();
    device_.release_staging(staging_);
    staging_ = {};
}

}  // namespace kvlc
