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
    for (Slot &slot : slots_) {
        for (cudaEvent_t event : {slot.full, slot.empty})
            if (event) (void)cudaEventDestroy(event);
        device_.release_packing(slot.memory);
    }
}

bool Lane::reserve(size_t groups) {
    size_t before = slots_.size();
    while (slots_.size() < std::min(groups, kSlots))
        if (!add_slot()) break;
    if (slots_.size() > before) next_ = before;
    return !slots_.empty();
}

bool Lane::add_slot() {
    char *memory = device_.acquire_packing();
    if (!memory) return false;
    slots_.emplace_back();
    Slot &slot = slots_.back();
    slot.memory = memory;
    try {
        for (cudaEvent_t *event : {&slot.full, &slot.empty})
            check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    } catch (...) {
        if (slot.full) (void)cudaEventDestroy(slot.full);
        device_.release_packing(memory);
        slots_.pop_back();
        throw;
    }
    return true;
}

}  // namespace kvlc
