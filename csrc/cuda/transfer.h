// SPDX-License-Identifier: Apache-2.0
// A plan in progress: its groups of copies are enqueued, and complete in order.
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
    void enqueue(const Plan &plan, Predecessor before);
    void enqueue_group(const Plan &plan, const Group &group);
    void follow(Predecessor before);
    void record_event();
    void release();

    cudaStream_t stream_;
    bool on_device_;
    unsigned flags_;
    uint64_t copies_;
    Staging staging_;
    std::vector<uint64_t> stops_;      // of the groups
    std::vector<cudaEvent_t> events_;  // one for each of them
};

}  // namespace kvlc
