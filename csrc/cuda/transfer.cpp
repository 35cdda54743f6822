// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "batch.h"
#include "recorded.h"

namespace kvlc {
namespace {

// A blocked thread is woken some 50 microseconds late, and the last group moves in 310.
constexpr std::chrono::microseconds kPolling{500};

}  // namespace

Transfer::Transfer(Device &device, const Plan &plan, ptrdiff_t shift, Predecessor before,
                   unsigned flags)
    : Pending(device), streams_(device.stream_set(plan.gather(), before.stream)), flags_(flags),
      tables_(plan.tables()), digests_(plan.digests()),
      staging_(device.acquire_staging(tables_.nbytes)) {
    auto words = [&](char *memory, size_t at) { return reinterpret_cast<uint32_t *>(memory + at); };
    call_ = {reinterpret_cast<const CrcSpan *>(staging_.device + tables_.spans),
             words(staging_.device, tables_.registers),
             words(staging_.device, tables_.done),
             words(staging_.mapped, tables_.registers),
             digests_.count(),
             digests_.pieces(digests_.spans().size()),
             device.crc_tables()};
    try {
        enqueue(plan, shift, before);
    } catch (...) {
        release();
        throw;
    }
}

Transfer::~Transfer() { release(); }

void Transfer::enqueue(const Plan &plan, ptrdiff_t shift, Predecessor before) {
    if (plan.groups().empty()) return;
    const bool has_tasks = !plan.tasks().empty();
    // Views that are only read are digested beside the copies, which begin first.
    const bool is_beside = !has_tasks && plan.gather() && !plan.on_device();
    std::lock_guard<std::mutex> guard(streams_.lock);
    streams_.open();
    is_open_ = true;
    is_packed_ = has_tasks && !plan.on_device() && streams_.open_buffers(plan.groups().size());
    last_ = is_packed_ && !plan.gather() ? streams_.kernels() : streams_.engines();
    if (staging_.nbytes) stage(plan, shift);
    try {
        std::optional<Recorded> now;
        const Pending &start =
            before.recorded ? *before.recorded : now.emplace(device_, before.stream);
        start.hold_back(streams_.engines());
        if (is_packed_) start.hold_back(streams_.kernels());
        if (!is_beside) send_tables(has_tasks);
        enqueue_groups(plan);
        if (is_beside) {
            start.hold_back(streams_.digests());
            send_tables(has_tasks);
        } else if (!is_packed_) {
            chain(streams_.digests(), streams_.engines());
        }
        if (!is_packed_) launch_digests(0, digests_.spans().size());
        if (digests_.count()) events_.push_back(record_event(streams_.digests()));
        events_.push_back(record_event(last_));
        if (!plan.gather() && !before.recorded) hold_back(before.stream);
    } catch (...) {
        // An event after what was enqueued may fail, too.
        for (cudaStream_t stream : {streams_.kernels(), streams_.digests(), streams_.engines()})
            (void)cudaStreamSynchronize(stream);
        throw;
    }
}

void Transfer::enqueue_groups(const Plan &plan) {
    const std::vector<Group> &groups = plan.groups();
    for (const Group &group : groups) {
        if (groups.size() > 1 && &group == &groups.back()) before_last_ = record_event(last_);
        if (!is_packed_) {
            enqueue_direct(plan, group);
            continue;
        }
        PackBuffer &buffer = streams_.buffer();
        enqueue_packed(plan, group, buffer);
        digest_packed(group, buffer);
        streams_.advance();
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

// On the stream that needs them first, so that no copy engine's first copy waits for them.
void Transfer::send_tables(bool has_tasks) {
    if (!staging_.nbytes) return;
    cudaStream_t stream = !has_tasks   ? streams_.digests()
                          : is_packed_ ? streams_.kernels()
                                       : streams_.engines();
    check(cudaMemcpyAsync(staging_.device, staging_.host, tables_.nbytes, cudaMemcpyHostToDevice,
                          stream),
          "cudaMemcpyAsync");
    if (digests_.count() && is_packed_) chain(streams_.digests(), stream);
}

void Transfer::enqueue_direct(const Plan &plan, const Group &group) {
    launch_tasks(plan, group, streams_.engines());
    copy_runs(plan.runs().data() + group.first_run, group.stop_run - group.first_run, plan.gather(),
              plan.on_device(), streams_.engines());
}

void Transfer::enqueue_packed(const Plan &plan, const Group &group, PackBuffer &buffer) {
    cudaStream_t first = plan.gather() ? streams_.kernels() : streams_.engines();
    if (buffer.is_used) check(cudaStreamWaitEvent(first, buffer.empty, 0), "cudaStreamWaitEvent");
    if (buffer.is_digested)
        check(cudaStreamWaitEvent(first, buffer.digested, 0), "cudaStreamWaitEvent");
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
    const unsigned most = is_packed_ ? device_.all_blocks() : device_.blocks();
    auto blocks = static_cast<unsigned>(std::min<uint64_t>(most, group.tiles));
    check(launch(plan.gather(), at, tasks, group.tiles, blocks, stream),
          "launching the copying kernel");
}

// What a buffer holds, and the group's runs, which lie in the views by then.
void Transfer::digest_packed(const Group &group, PackBuffer &buffer) {
    buffer.is_digested = group.first_span != group.stop_span;
    if (!buffer.is_digested) return;
    check(cudaStreamWaitEvent(streams_.digests(), buffer.full, 0), "cudaStreamWaitEvent");
    launch_digests(group.first_span, group.stop_span);
    check(cudaEventRecord(buffer.digested, streams_.digests()), "cudaEventRecord");
}

void Transfer::launch_digests(size_t first_span, size_t stop_span) {
    const uint64_t first = digests_.pieces(first_span), stop = digests_.pieces(stop_span);
    if (first == stop) return;
    auto blocks = static_cast<unsigned>(std::min<uint64_t>(device_.all_blocks(), stop - first));
    check(launch_digest(call_, digests_.spans().size(), first, stop, blocks, streams_.digests()),
          "launching the digesting kernel");
}

void Transfer::chain(cudaStream_t stream, cudaStream_t behind) {
    cudaEvent_t event = record_event(behind);
    cudaError_t status = cudaStreamWaitEvent(stream, event, 0);
    device_.release_event(event, flags_);
    check(status, "cudaStreamWaitEvent");
}

cudaEvent_t Transfer::record_event(cudaStream_t stream) {
    cudaEvent_t event = device_.acquire_event(flags_);
    cudaError_t status = cudaEventRecord(event, stream);
    if (status != cudaSuccess) device_.release_event(event, flags_);
    check(status, "cudaEventRecord");
    return event;
}

void Transfer::hold_back(cudaStream_t stream) const {
    for (cudaEvent_t event : events_)
        check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

void Transfer::wait() const {
    if (before_last_) check(cudaEventSynchronize(before_last_), "copying");
    const auto stop = std::chrono::steady_clock::now() + kPolling;
    while (!is_complete())
        if (std::chrono::steady_clock::now() > stop) {
            for (cudaEvent_t event : events_) check(cudaEventSynchronize(event), "copying");
            return;
        }
}

bool Transfer::is_complete() const { return std::all_of(events_.begin(), events_.end(), is_over); }

void Transfer::digests(uint32_t *crcs, uint64_t count) const {
    if (count != digests_.count())
        kvl::fail(KVL_EARGUMENT, "%llu digests of a ticket that has %llu",
                  static_cast<unsigned long long>(count),
                  static_cast<unsigned long long>(digests_.count()));
    if (!count) return;
    wait();
    digests_.finish(reinterpret_cast<const uint32_t *>(staging_.host + tables_.registers), crcs);
}

void Transfer::release() {
    for (cudaEvent_t event : events_) {
        (void)cudaEventSynchronize(event);
        device_.release_event(event, flags_);
    }
    events_.clear();
    if (before_last_) device_.release_event(before_last_, flags_);
    before_last_ = nullptr;
    device_.release_staging(staging_);
    staging_ = {};
    if (is_open_) streams_.close();
    is_open_ = false;
}

}  // namespace kvlc
