// SPDX-License-Identifier: Apache-2.0
// Work of a device that a ticket stands for.
#pragma once

#include "device.h"

namespace kvlc {

constexpr unsigned kEventFlags = cudaEventDisableTiming | cudaEventBlockingSync;

class Pending {
  public:
    explicit Pending(Device &device) : device_(device) {}
    virtual ~Pending() = default;
    Pending(const Pending &) = delete;
    Pending &operator=(const Pending &) = delete;

    Device &device() const { return device_; }

    // The caller of these is on the device.
    virtual void wait() const = 0;                          // blocks until all is complete
    virtual bool is_complete() const = 0;                   // does not block
    virtual void finish() const = 0;                        // blocks for as long as memory is used
    virtual void hold_back(cudaStream_t stream) const = 0;  // later work there waits for all of it
    // Blocks, and writes the digests; throws unless there are `count` of them.
    virtual void digests(uint32_t *crcs, uint64_t count) const = 0;

  protected:
    Device &device_;
};

// Throws KVL_EARGUMENT if the stream is being captured: what waits for a captured stream is
// captured, too, and does nothing.
void refuse_capture(cudaStream_t stream);

// Whether what an event recorded is over; does not block.
bool is_over(cudaEvent_t event);

}  // namespace kvlc
