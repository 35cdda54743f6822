// SPDX-License-Identifier: Apache-2.0
#include "transfer.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "batch.h"
#include "pinned.h"
#include "recorded.h"

namespace kvlc {
namespace {

// A blocked thread is woken up to 300 microseconds late, on a processor that has slowed down. So it
// polls for as long as the bytes take on PCIe 3, or 64 MiB of them.
std::chrono::microseconds polling_for(const std::vector<Group> &groups) {
    constexpr uint64_t kBytesPerMicrosecond = 12000, kMost = 6000;
    uint64_t nbytes = 0;
    for (const Group &group : groups) nbytes += group.nbytes;
    return std::chrono::microseconds(std::min(200 + nbytes / kBytesPerMicrosecond, kMost));
}

}  // namespace

Transfer::Transfer(Device &device, const Plan &plan, Predecessor before, unsigned flags)
    : Pending(device), streams_(device.stream_set(plan.gather(), before.stream)), flags_(flags),
      tables_(plan.tables()), digests_(plan.digests()), polling_(polling_for(plan.groups())),
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
        enqueue(plan, before);
    } catch (...) {
        release();
        throw;
    }
}

Transfer::~Transfer() { release(); }

void Transfer::enqueue(const Plan &plan, Predecessor before) {
    if (plan.groups().empty()) return;
    const bool has_tasks = !plan.tasks().empty();
    // Views that are only read are digested beside the copies, which begin first.
    const bool is_beside = !has_tasks && plan.gather() && !plan.on_device();
    std::lock_guard<std::mutex> guard(streams_.lock);
    streams_.open();
    is_open_ = true;
    is_packed_ = has_tasks && !plan.on_device() && streams_.open_buffers(plan.groups().size());
    first_ = is_packed_ && plan.gather() ? streams_.kernels() : streams_.engines();
    last_ = is_packed_ && !plan.gather() ? streams_.kernels() : streams_.engines();
    if (staging_.nbytes) stage(plan);
    try {
        std::optional<Recorded> now;
        const Pending &start =
            before.recorded ? *before.recorded : now.emplace(device_, before.stream);
        start.hold_back(first_);
        if (!is_beside) send_tables(has_tasks);
        enqueue_groups(plan);
        if (is_beside) {
            start.hold_back(streams_.kernels());
            send_tables(has_tasks);
        } else if (!is_packed_) {
            chain(streams_.kernels(), streams_.engines());
        }
        if (!is_packed_) launch_digests(0, digests_.spans().size());
        if (digests_.count()) events_.push_back(record_event(streams_.kernels()));
        if (!digests_.count() || last_ != streams_.kernels())
            events_.push_back(record_event(last_));
        if (!plan.gather() && !before.recorded) hold_back(before.stream);
    } catch (...) {
        // An event after what was enqueued may fail, too.
        for (cudaStream_t stream : {streams_.kernels(), streams_.engines()})
            (void)cudaStreamSynchronize(stream);
        throw;
    }
}

void Transfer::enqueue_groups(const Plan &plan) {
    for (const Group &group : plan.groups()) {
        if (is_packed_) {
            plan.gather() ? gather_packed(plan, group) : scatter_packed(plan, group);
            streams_.advance();
        } else {
            enqueue_direct(plan, group);
        }
    }
}

void Transfer::stage(const Plan &plan) {
    const bool is_direct = !plan.tasks().empty() && !is_packed_ && !plan.on_device();
    const ptrdiff_t shift = is_direct ? device_shift(plan.payload()) : 0;
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
    cudaStream_t stream = has_tasks && !is_packed_ ? streams_.engines() : streams_.kernels();
    check(cudaMemcpyAsync(staging_.device, staging_.host, tables_.nbytes, cudaMemcpyHostToDevice,
                          stream),
          "cudaMemcpyAsync");
}

void Transfer::enqueue_direct(const Plan &plan, const Group &group) {
    launch_tasks(plan, group, streams_.engines());
    copy_runs(plan.runs().data() + group.first_run, group.stop_run - group.first_run, plan.gather(),
              plan.on_device(), streams_.engines());
}

// The digests are of what the buffer holds, and of the group's runs, which lie in the views.
void Transfer::gather_packed(const Plan &plan, const Group &group) {
    PackBuffer &buffer = streams_.buffer();
    if (buffer.is_used) wait_event(streams_.kernels(), buffer.empty);
    launch_tasks(plan, group, streams_.kernels());
    check(cudaEventRecord(buffer.full, streams_.kernels()), "cudaEventRecord");
    wait_event(streams_.engines(), buffer.full);
    move_packed(plan, group, buffer);
    check(cudaEventRecord(buffer.empty, streams_.engines()), "cudaEventRecord");
    buffer.is_used = true;
    launch_digests(group.first_span, group.stop_span);
}

void Transfer::scatter_packed(const Plan &plan, const Group &group) {
    PackBuffer &buffer = streams_.buffer();
    if (buffer.is_used) wait_event(streams_.engines(), buffer.empty);
    move_packed(plan, group, buffer);
    check(cudaEventRecord(buffer.full, streams_.engines()), "cudaEventRecord");
    wait_event(streams_.kernels(), buffer.full);
    launch_tasks(plan, group, streams_.kernels());
    launch_digests(group.first_span, group.stop_span);
    check(cudaEventRecord(buffer.empty, streams_.kernels()), "cudaEventRecord");
    buffer.is_used = true;
}

void Transfer::move_packed(const Plan &plan, const Group &group, const PackBuffer &buffer) {
    std::vector<Run> runs = plan.packed_runs(group, buffer.memory);
    copy_runs(runs.data(), runs.size(), plan.gather(), false, streams_.engines());
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

void Transfer::launch_digests(size_t first_span, size_t stop_span) {
    const uint64_t first = digests_.pieces(first_span), stop = digests_.pieces(stop_span);
    if (first == stop) return;
    auto blocks = static_cast<unsigned>(std::min<uint64_t>(device_.all_blocks(), stop - first));
    check(launch_digest(call_, digests_.spans().size(), first, stop, blocks, streams_.kernels()),
          "launching the digesting kernel");
}

void Transfer::chain(cudaStream_t stream, cudaStream_t behind) {
    cudaEvent_t event = record_event(behind);
    cudaError_t status = cudaStreamWaitEvent(stream, event, 0);
    device_.release_event(event, flags_);
    check(status, "cudaStreamWaitEvent");
}

void Transfer::wait_event(cudaStream_t stream, cudaEvent_t event) const {
    check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

cudaEvent_t Transfer::record_event(cudaStream_t stream) {
    cudaEvent_t event = device_.acquire_event(flags_);
    cudaError_t status = cudaEventRecord(event, stream);
    if (status != cudaSuccess) device_.release_event(event, flags_);
    check(status, "cudaEventRecord");
    return event;
}

void Transfer::hold_back(cudaStream_t stream) const {
    for (cudaEvent_t event : events_) wait_event(stream, event);
}

void Transfer::wait() const {
    const auto stop = std::chrono::steady_clock::now() + polling_;
    while (!is_complete()) {
        if (std::chrono::steady_clock::now() > stop) {
            for (cudaEvent_t event : events_) check(cudaEventSynchronize(event), "copying");
            return;
        }
        std::this_thread::yield();
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
    device_.release_staging(staging_);
    staging_ = {};
    if (is_open_) streams_.close();
    is_open_ = false;
}

}  // namespace kvlc
