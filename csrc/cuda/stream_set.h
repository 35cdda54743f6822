// SPDX-License-Identifier: Apache-2.0
// Where the copies run that follow one stream of a caller, in one direction.
#pragma once

#include <mutex>
#include <vector>

#include "runtime.h"

namespace kvlc {

class Device;

// Memory of the device in which a kernel packs what a copy engine then moves, or the reverse.
struct PackBuffer {
    char *memory = nullptr;
    cudaEvent_t full = nullptr, empty = nullptr;
    bool is_used = false;  // `empty` was recorded, and may lie ahead
};

class StreamSet {
  public:
    explicit StreamSet(Device &device) : device_(device) {}
    StreamSet(const StreamSet &) = delete;
    StreamSet &operator=(const StreamSet &) = delete;

    // Held while a transfer is enqueued: buffers are used in the order of the streams.
    std::mutex lock;

    cudaStream_t engines() const { return engines_; }
    cudaStream_t kernels() const { return kernels_; }

    // Begin a transfer, for which there are streams then. The lock is held.
    void open();
    // Take buffers for so many groups that it packs; false if the device has no memory for one.
    bool open_buffers(size_t groups);
    // End one whose work is over. Streams and buffers that no transfer uses are the device's again.
    // Locks.
    void close();
    // The buffers in turn: the one of the `ahead`-th group from now on.
    PackBuffer &buffer(size_t ahead = 0) { return buffers_[(next_ + ahead) % buffers_.size()]; }
    void advance() { next_ = (next_ + 1) % buffers_.size(); }

  private:
    void release_streams();

    Device &device_;
    cudaStream_t engines_ = nullptr, kernels_ = nullptr;
    std::vector<PackBuffer> buffers_;
    size_t next_ = 0, transfers_ = 0;
};

}  // namespace kvlc
