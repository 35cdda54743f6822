// SPDX-License-Identifier: Apache-2.0
// Where the copies run that follow one stream of a caller, in one direction.
#pragma once

#include <mutex>
#include <vector>

#include "runtime.h"

namespace kvlc {

class Device;

// Memory of the device in which a kernel packs what a copy engine then moves, or the reverse.
struct Slot {
    char *memory = nullptr;
    cudaEvent_t full = nullptr, empty = nullptr;
    bool is_used = false;  // before: `empty` was recorded
};

class Lane {
  public:
    // The caller is on the device.
    explicit Lane(Device &device);
    ~Lane();
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    // Held while a transfer is enqueued: slots are used in the order of the streams.
    std::mutex lock;

    cudaStream_t engines() const { return engines_; }
    cudaStream_t kernels() const { return kernels_; }

    // Provide slots for so many groups, or as many as are ever in use at once. False if the device
    // has no memory for one.
    bool reserve(size_t groups);
    // The slots in turn: the one of the `ahead`-th group from now on.
    Slot &slot(size_t ahead = 0) { return slots_[(next_ + ahead) % slots_.size()]; }
    void advance() { next_ = (next_ + 1) % slots_.size(); }

  private:
    bool add_slot();

    Device &device_;
    cudaStream_t engines_ = nullptr, kernels_ = nullptr;
    std::vector<Slot> slots_;
    size_t next_ = 0;
};

}  // namespace kvlc
