// SPDX-License-Identifier: Apache-2.0
// State of a device: streams, memory, and the measured crossover.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "crc.h"
#include "kvlink_cuda.h"
#include "plan.h"
#include "runtime.h"
#include "stream_set.h"

namespace kvlc {

// Page-locked host memory, its address on the device, and device memory of the same size.
struct Staging {
    char *host = nullptr, *mapped = nullptr, *device = nullptr;
    size_t nbytes = 0;
};

constexpr size_t kPacking = kGroup + (64 << 10);  // a group may end behind it, by one tile

class Device {
  public:
    // Opened at its first use and kept. Throws if there is no such device.
    static Device &get(uint64_t number);
    // KVLC_MEASURED if `crossover` has measured none; opens nothing.
    static uint64_t known_crossover(uint64_t number, bool gather);

    // The caller of these is on the device.

    // Where copies run that follow `caller_stream`; one each, so that callers do not wait for each
    // other.
    StreamSet &stream_set(bool gather, cudaStream_t caller_stream);
    // For one that will be destroyed; nothing is in progress that follows it.
    void forget(cudaStream_t caller_stream);

    // The stream for work that follows no caller's, and that its caller waits for.
    cudaStream_t staged_stream();

    // Released streams are used again: to create one may wait for all work of the device.
    cudaStream_t acquire_stream();
    void release_stream(cudaStream_t stream);

    // Released staging memory is reused, since allocating some may wait for the device.
    Staging acquire_staging(size_t nbytes);
    void release_staging(Staging staging);

    // A buffer of `kPacking` bytes that no work uses; without memory if the device has none left.
    PackBuffer acquire_buffer();
    void release_buffer(PackBuffer buffer);

    // Released events are used again, also while streams still wait for what they recorded.
    cudaEvent_t acquire_event(unsigned flags);
    void release_event(cudaEvent_t event, unsigned flags);

    // Measured at its first use; see plan.h.
    uint64_t crossover(bool gather);

    uint64_t number() const { return number_; }
    // Blocks of a kernel that accesses host memory, and at most of one that does not.
    unsigned blocks() const { return blocks_; }
    unsigned all_blocks() const { return all_blocks_; }
    // In the device's memory.
    const CrcTables *crc_tables() const { return crc_tables_; }

  private:
    explicit Device(uint64_t number);
    void send_crc_tables();

    std::mutex lock_, measuring_, streams_lock_;
    std::map<std::pair<bool, cudaStream_t>, std::unique_ptr<StreamSet>> sets_;
    cudaStream_t staged_stream_ = nullptr;
    std::vector<cudaStream_t> free_streams_;
    std::vector<Staging> free_;
    std::vector<PackBuffer> free_buffers_;
    std::map<unsigned, std::vector<cudaEvent_t>> free_events_;  // by flags
    const uint64_t number_;
    unsigned blocks_ = 0, all_blocks_ = 0;
    const CrcTables *crc_tables_ = nullptr;
    std::atomic<bool> measured_{false};
    uint64_t crossovers_[2] = {};
};

// The number of devices; throws KVLC_ENODEVICE if there are none.
uint64_t count_devices();

}  // namespace kvlc
