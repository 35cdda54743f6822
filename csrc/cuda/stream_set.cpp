// SPDX-License-Identifier: Apache-2.0
#include "stream_set.h"

#include <algorithm>

#include "device.h"

namespace kvlc {
namespace {

// One is packed while the other one is moved, which takes much longer.
constexpr size_t kBuffers = 2;

}  // namespace

void StreamSet::open() {
    if (!transfers_) {
        try {
            for (cudaStream_t *stream : {&engines_, &kernels_}) *stream = device_.acquire_stream();
        } catch (...) {
            release_streams();
            throw;
        }
    }
    transfers_++;
}

bool StreamSet::open_buffers(size_t groups) {
    size_t before = buffers_.size();
    while (buffers_.size() < std::min(groups, kBuffers)) {
        PackBuffer buffer = device_.acquire_buffer();
        if (!buffer.memory) break;
        buffers_.push_back(buffer);
    }
    if (buffers_.size() > before) next_ = before;
    return !buffers_.empty();
}

void StreamSet::close() {
    std::lock_guard<std::mutex> guard(lock);
    if (--transfers_) return;
    for (PackBuffer &buffer : buffers_) device_.release_buffer(buffer);
    buffers_.clear();
    release_streams();
}

void StreamSet::release_streams() {
    for (cudaStream_t *stream : {&engines_, &kernels_}) {
        if (*stream) device_.release_stream(*stream);
        *stream = nullptr;
    }
}

}  // namespace kvlc
