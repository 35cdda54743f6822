// SPDX-License-Identifier: Apache-2.0
#include "stream_set.h"

#include <algorithm>

#include "device.h"

namespace kvlc {
namespace {

// One is packed while the other one is moved, which takes much longer.
constexpr size_t kBuffers = 2;

}  // namespace

StreamSet::StreamSet(Device &device) : device_(device) {
    try {
        for (cudaStream_t *stream : {&engines_, &kernels_, &digests_})
            *stream = device.acquire_stream();
    } catch (...) {
        release();
        throw;
    }
}

StreamSet::~StreamSet() { release(); }

void StreamSet::release() {
    for (cudaStream_t stream : {engines_, kernels_, digests_})
        if (stream) device_.release_stream(stream);
}

bool StreamSet::open(size_t groups) {
    size_t before = buffers_.size();
    while (buffers_.size() < std::min(groups, kBuffers)) {
        PackBuffer buffer = device_.acquire_buffer();
        if (!buffer.memory) break;
        buffers_.push_back(buffer);
    }
    if (buffers_.size() > before) next_ = before;
    if (buffers_.empty()) return false;
    transfers_++;
    return true;
}

void StreamSet::close() {
    std::lock_guard<std::mutex> guard(lock);
    if (--transfers_) return;
    for (PackBuffer &buffer : buffers_) device_.release_buffer(buffer);
    buffers_.clear();
}

}  // namespace kvlc
