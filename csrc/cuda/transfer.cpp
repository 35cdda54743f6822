// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>

#include "batch.h"
#include "kernel.h"
#include "recorded.h"

namespace kvlc {

Transfer::Transfer(Device &device, const Plan &plan, Placement payload, Predecessor before,
                   unsigned flags)
    : Pending(device), streams_(device.stream_pair(plan.gather(), before.stream)),
      last_(streams_.engines()), flags_(flags), copies_(plan.copies()),
      staging_(device.acquire_staging(plan.staged_nbytes())) {
    try {
        enqueue(plan, payload, before);
    } catch (...) {
        release();
        throw;
    }
}

Transfer::~Transfer() { release(); }

void Transfer::enqueue(const Plan &plan, Placement payload, Predecessor before) {
    if (plan.groups().empty()) return;
    events_.reserve(plan.groups().size());
    std::lock_guard<std::mutex> guard(streams_.lock);
    is_packed_ = !plan.tasks().empty() && !payload.on_device && streams_.open(plan.groups().size());
    if (is_packed_ && !plan.gather()) last_ = streams_.kernels();
    if (staging_.nbytes) stage(plan, payload.shift);
    try {
        follow(before);
        cudaStream_t tables = is_packed_ ? streams_.kernels() : streams_.engines();
        if (staging_.nbytes)
            check(cudaMemcpyAsync(staging_.device, staging_.host, plan.staged_nbytes(),
                                  cudaMemcpyHostToDevice, tables),
                  "cudaMemcpyAsync");
        for (const Group &group : plan.groups()) {
            if (is_packed_)
                enqueue_packed(plan, group, streams_.buffer()), streams_.advance();
            else
                enqueue_direct(plan, group, payload.on_device);
            record_event();
            stops_.push_back(group.stop);
        }
        if (!plan.gather() && !before.recorded) hold_back(before.stream);
    } catch (...) {
        // An event after what was enqueued may fail, too.
        for (cudaStream_t stream : {streams_.kernels(), streams_.engines()})
            (void)cudaStreamSynchronize(stream);
        throw;
    }
}

void Transfer::stage(const Plan &plan, ptrdiff_t shift) {
    std::vector<char *> payloads;
    payloads.reserve(plan.tasks().size());
    for (size_t number = 0; number < plan.groups().size(); number++) {
        const Group &group = plan.groups()[number];
        for (size_t task = group.first_task; task < group.stop_task; task++)
            payloads.push_back(is_packed_ ? plan.packed(task, streams_.buffer(number).memory)
                                          : plan.mapped(task, shift));
    }
    plan.stage(staging_.host, staging_.device, payloads);
}

void Transfer::enqueue_direct(const Plan &plan, const Group &group, bool on_device) {
    launch_tasks(plan, group, streams_.engines());
    copy_runs(plan.runs().data() + group.first_run, group.stop_run - group.first_run, plan.gather(),
              on_device, streams_.engines());
}

void Transfer::enqueue_packed(const Plan &plan, const Group &group, PackBuffer &buffer) {
    cudaStream_t first = plan.gather() ? streams_.kernels() : streams_.engines();
    if (buffer.is_used) check(cudaStreamWaitEvent(first, buffer.empty, 0), "cudaStreamWaitEvent");
    auto move = [&] {
        std::vector<Run> runs = plan.packed_runs(group, buffer.memory);
        copy_runs(runs.data(), runs.size(), plan.gather(), false, streams_.engines());
    };
    plan.gather() ? launch_tasks(plan, group, first) : move();
    check(cudaEventRecord(buffer.full, first), "cudaEventRecord");
    check(cudaStreamWaitEvent(last_, buffer.full, 0), "cudaStreamWaitEvent");
    plan.gather() ? move() : launch_tasks(plan, group, last_);
    check(cudaEventRecord(buffer.empty, last_), "cudaEventRecord");
    buffer.is_used = true;
}

void Transfer::launch_tasks(const Plan &plan, const Group &group, cudaStream_t stream) {
    uint64_t tasks = group.stop_task - group.first_task;
    if (!tasks) return;
    auto at = reinterpret_cast<const Task *>(staging_.device) + group.first_task;
    auto blocks = static_cast<unsigned>(std::min<uint64_t>(device_.blocks(), group.tiles));
    check(launch(plan.gather(), at, tasks, group.tiles, blocks, stream),
          "launching the copying kernel");
}

void Transfer::follow(Predecessor before) {
    auto hold_back = [&](const Pending &pending) {
        pending.hold_back(streams_.engines());
        if (is_packed_) pending.hold_back(streams_.kernels());
    };
    before.recorded ? hold_back(*before.recorded) : hold_back(Recorded(device_, before.stream));
}

void Transfer::record_event() {
    events_.push_back(device_.acquire_event(flags_));
    check(cudaEventRecord(events_.back(), last_), "cudaEventRecord");
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
    if (is_packed_) streams_.close();
    is_packed_ = false;
}

}  // namespace kvlc
