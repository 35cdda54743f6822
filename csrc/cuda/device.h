// What is kept for each device: streams, staging memory, and what was measured once.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "kvlink_cuda.h"
#include "runtime.h"

namespace kvlc {

// Page-locked host memory and as much of the device's.
struct Staging {
    char *host = nullptr, *device = nullptr;
    size_t nbytes = 0;
};

class Device {
  public:
    // Opened at its first use, and kept. Throws if there is none.
    static Device &get(uint64_t number);

    // For these the caller is on the device.

    // Ours for what the caller orders on `theirs`: one caller's wait must not hold up another.
    cudaStream_t stream(bool gather, cudaStream_t theirs);

    // Kept until given back. Making one may wait for the device, which is why they are kept.
    Staging take_staging(size_t nbytes);
    void give_back(Staging staging);

    // Measured at its first use; see plan.h.
    uint64_t crossover(bool gather);

    unsigned blocks() const { return blocks_; }

  private:
    explicit Device(uint64_t number);

    std::mutex lock_, measuring_;
    std::map<std::pair<bool, cudaStream_t>, cudaStream_t> streams_;
    std::vector<Staging> free_;
    unsigned blocks_ = 0;
    bool measured_ = false;
    uint64_t crossovers_[2] = {};
};

// How many there are; throws with KVLC_ENODEVICE if none.
uint64_t count_devices();

}  // namespace kvlc
