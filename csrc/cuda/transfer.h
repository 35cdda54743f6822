// SPDX-License-Identifier: Apache-2.0
// A plan in progress.
//
// Between host memory and views whose runs are short, a kernel packs the runs of a group in device
// memory, and the copy engines move what is packed: a kernel that accesses host memory would hold
// processors of the device for as long as the bytes take. It does so where there is no memory to
// pack in, and within a device it copies directly.
//
// Digests are the device's work, too, on a stream of their own: a kernel that waits until a model's
// leaves it a processor does not make the next group wait, as well.
#pragma once

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
    // Enqueue after the predecessor. If it throws, nothing is in progress. `shift`: from the host's
    // address of the payload to the device's; see device_shift. `flags`: of its events.
    Transfer(Device &device, const Plan &plan, ptrdiff_t shift, Predecessor before,
             unsigned flags = kEventFlags);
    // Blocks until all copies are complete.
    ~Transfer() override;

    void wait() const override;
    bool is_complete() const override;
    void finish() const override { wait(); }
    void hold_back(cudaStream_t stream) const override;
    void digests(uint32_t *crcs, uint64_t count) const override;

  private:
    void enqueue(const Plan &plan, ptrdiff_t shift, Predecessor before);
    void stage(const Plan &plan, ptrdiff_t shift);
    void send_tables(bool has_tasks);
    void enqueue_groups(const Plan &plan);
    void enqueue_direct(const Plan &plan, const Group &group);
    void enqueue_packed(const Plan &plan, const Group &group, PackBuffer &buffer);
    void launch_tasks(const Plan &plan, const Group &group, cudaStream_t stream);
    void digest_packed(const Group &group, PackBuffer &buffer);
    void launch_digests(size_t first_span, size_t stop_span);
    // Let a stream wait for what another one holds now.
    void chain(cudaStream_t stream, cudaStream_t behind);
    cudaEvent_t record_event(cudaStream_t stream);
    void release();

    StreamSet &streams_;
    bool is_open_ = false, is_packed_ = false;
    cudaStream_t last_ = nullptr;  // on which groups end
    DigestCall call_{};
    unsigned flags_;
    Tables tables_;
    Digests digests_;
    Staging staging_;
    cudaEvent_t before_last_ = nullptr;  // of several groups, behind all but the last one
    std::vector<cudaEvent_t> events_;    // behind which nothing is in progress
};

}  // namespace kvlc
