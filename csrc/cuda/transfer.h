// SPDX-License-Identifier: Apache-2.0
// A plan in progress: its groups of copies are enqueued, and complete in order.
#pragma once

#include <vector>

#include "device.h"
#include "plan.h"

namespace kvlc {

class Transfer {
  public:
    // Enqueue after the work that `caller_stream` holds now. If it throws, nothing is in progress.
    // `shift`: see device_shift. `flags`: of the events.
    Transfer(Device &device, const Plan &plan, ptrdiff_t shift, cudaStream_t caller_stream,
             unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync);
    // Blocks until all copies are complete.
    ~Transfer();
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;

    void wait(uint64_t copy) const;
    void wait_all() const;
    uint64_t complete() const;

  private:
    void enqueue(const Plan &plan, cudaStream_t caller_stream);
    void enqueue_group(const Plan &plan, const Group &group);
    void follow(cudaStream_t first, cudaStream_t then);
    void record_event();
    void release();

    Device &device_;
    cudaStream_t stream_;
    unsigned flags_;
    uint64_t copies_;
    Staging staging_;
    std::vector<uint64_t> stops_;      // of the groups
    std::vector<cudaEvent_t> events_;  // one for each of them
};

}  // namespace kvlc
