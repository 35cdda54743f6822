// A plan under way: enqueued, waited for group by group, finished.
#pragma once

#include <vector>

#include "device.h"
#include "plan.h"

namespace kvlc {

class Transfer {
  public:
    // Enqueue behind what `theirs` holds now. Throws; nothing is under way then.
    // `shift`: see device_shift. `flags`: of the events.
    Transfer(Device &device, const Plan &plan, ptrdiff_t shift, cudaStream_t theirs,
             unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync);
    // Sleeps until all is complete.
    ~Transfer();
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;

    void wait(uint64_t copy) const;
    void wait_all() const;
    uint64_t complete() const;

  private:
    void enqueue(const Plan &plan, cudaStream_t theirs);
    void enqueue_group(const Plan &plan, const Group &group);
    void follow(cudaStream_t first, cudaStream_t then);
    void mark();
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
