// SPDX-License-Identifier: Apache-2.0
// A plan in progress.
//
// Between host memory and views whose runs are short, a kernel packs the runs of a group in device
// memory, and the copy engines move what is packed: a kernel that accesses host memory would hold
// processors of the device for as long as the bytes take. It does so where there is no memory to
// pack in, and within a device it copies directly.
//
// Digests are the device's work, too, and run beside the copies: a kernel behind the one that
// packs, on the same stream. With a third stream that waits for events, copies were slower now and
// then, by 8 % on an H200, by which streams they were.
#pragma once

#include <chrono>
#include <vector>

#include "kernel.h"
#include "pending.h"
#include "plan.h"

namespace kvlc {

// Before a transfer: what `stream` holds now, or held when it was recorded.
struct Predecessor {
    cudaStream_t stream;
    const Pending *recorded;  // or null
};

class Transfer : public Pending {
  public:
    // Enqueue after the predecessor. If it throws, nothing is in progress. `flags`: of its events.
    Transfer(Device &device, const Plan &plan, Predecessor before, unsigned flags = kEventFlags);
    // Blocks until all copies are complete.
    ~Transfer() override;

    void wait() const override;
    bool is_complete() const override;
    void finish() const override { wait(); }
    void hold_back(cudaStream_t stream) const override;
    void digests(uint32_t *crcs, uint64_t count) const override;

  private:
    void enqueue(const Plan &plan, Predecessor before);
    void stage(const Plan &plan);
    void send_tables(bool has_tasks);
    void enqueue_groups(const Plan &plan);
    void enqueue_direct(const Plan &plan, const Group &group);
    void gather_packed(const Plan &plan, const Group &group);
    void scatter_packed(const Plan &plan, const Group &group);
    void move_packed(const Plan &plan, const Group &group, const PackBuffer &buffer);
    void launch_tasks(const Plan &plan, const Group &group, cudaStream_t stream);
    void launch_digests(size_t first_span, size_t stop_span);
    // Let a stream wait for what another one holds now.
    void chain(cudaStream_t stream, cudaStream_t behind);
    void wait_event(cudaStream_t stream, cudaEvent_t event) const;
    cudaEvent_t record_event(cudaStream_t stream);
    void release();

    StreamSet &streams_;
    bool is_open_ = false, is_packed_ = false;
    cudaStream_t first_ = nullptr, last_ = nullptr;  // on which groups begin, and end
    DigestCall call_{};
    unsigned flags_;
    Tables tables_;
    Digests digests_;
    const std::chrono::microseconds polling_;
    Staging staging_;
    std::vector<cudaEvent_t> events_;  // behind which nothing is in progress
};

}  // namespace kvlc
