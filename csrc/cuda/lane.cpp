// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include <algorithm>

#include "device.h"

namespace kvlc {
namespace {

// One is packed and one is moved, and the third lets neither wait for the other.
constexpr size_t kSlots = 3;

cudaStream_t make_stream() {
    cudaStream_t made;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    return made;
}

}  // namespace

Lane::Lane(Device &device) : device_(device), engines_(make_stream()) {
    try {
        kernels_ = make_stream();
    } catch (...) {
        (void)cudaStreamDestroy(engines_);
        throw;
    }
}

Lane::~Lane() {
    for (cudaStream_t stream : {engines_, kernels_}) (void)cudaStreamDestroy(stream);
}

bool Lane::open(size_t groups) {
    size_t before = slots_.size();
    while (slots_.size() < std::min(groups, kSlots)) {
        Slot slot = device_.acquire_slot();
        if (!slot.memory) break;
        slots_.push_back(slot);
    }
    if (slots_.size() > before) next_ = before;
    if (slots_.empty()) return false;
    transfers_++;
    return true;
}

void Lane::close() {
    std::lock_guard<std::mutex> guard(lock);
    if (--transfers_) return;
    for (Slot &slot : slots_) device_.release_slot(slot);
    slots_.clear();
}

}  // namespace kvlc
