// SPDX-License-Identifier: Apache-2.0
// A plan in progress: its groups of copies are enqueued, and complete in order.
//
// Between host memory and views whose runs are short, a kernel packs the runs of a group in device
// memory, and the copy engines move what is packed: a kernel that accesses host memory would hold
// processors of the device for as long as the bytes take. It does so where there is no memory to
// pack in, and within a device it copies directly.
#pragma once

#include <vector>

#include "pending.h"
#include "plan.h"

namespace kvlc {

// Before a transfer: what `stream` holds now, or held when it was recorded.
struct Predecessor {
    cudaStream_t stream;
    const Pending *recorded;  // or null
};

// Where the device finds a payload.
struct Placement {
    ptrdiff_t shift = 0;     // of a host address: see device_shift
    bool on_device = false;  // in memory of kvlc_allocate
};

class Transfer : public Pending {
  public:
    // Enqueue after the predecessor. If it throws, nothing is in progress. `flags`: of the events.
    Transfer(Device &device, const Plan &plan, Placement payload, Predecessor before,
             unsigned flags = kEventFlags);
    // Blocks until all copies are complete.
    ~Transfer() override;

    void wait(uint64_t copy) const override;
    uint64_t complete() const override;
    void finish() const override { wait(UINT64_MAX); }
    void hold_back(cudaStream_t stream) const override;

  private:
    void enqueue(const Plan &plan, Placement payload, Predecessor before);
    void stage(const Plan &plan, ptrdiff_t shift);
    void enqueue_direct(const Plan &plan, const Group &group, bool on_device);
    void enqueue_packed(const Plan &plan, const Group &group, PackBuffer &buffer);
    void launch_tasks(const Plan &plan, const Group &group, cudaStream_t stream);
    void follow(Predecessor before);
    void record_event();
    void release();

    StreamPair &streams_;
    bool is_packed_ = false;
    cudaStream_t last_;  // on which groups end
    unsigned flags_;
    uint64_t copies_;
    Staging staging_;
    std::vector<uint64_t> stops_;      // of the groups
    std::vector<cudaEvent_t> events_;  // one for each of them
};

}  // namespace kvlc
