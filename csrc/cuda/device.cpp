// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "calibrate.h"
#include "kernel.h"

namespace kvlc {
namespace {

constexpr size_t kStaging = 256 << 10;  // holds the tables of most calls
constexpr int kFirstStaging = 4, kFirstBuffers = 4;
constexpr int kFirstStreams = 17;  // for transfers that follow eight streams at once, and others

using ull = unsigned long long;

std::mutex opening;
// Never destroyed: at the end of the process CUDA may be unloaded first.
auto &devices = *new std::vector<std::unique_ptr<Device>>;

// A part of the device that saturates a PCIe link many times and leaves the rest to the model.
unsigned choose_blocks(int processors) {
    return static_cast<unsigned>(std::clamp(processors / 8, 8, 32));
}

// The whole device, for a few microseconds: a model's kernel that needs all processors waits for
// the slowest of them.
unsigned choose_all_blocks(int processors) {
    return static_cast<unsigned>(std::max(4 * processors, 1));
}

Staging make_staging(size_t nbytes) {
    Staging made;
    made.nbytes = std::max(nbytes, kStaging);
    void *host = nullptr, *mapped = nullptr, *device = nullptr;
    check(cudaMallocHost(&host, made.nbytes), "cudaMallocHost");
    cudaError_t status = cudaHostGetDevicePointer(&mapped, host, 0);
    if (status == cudaSuccess) status = cudaMalloc(&device, made.nbytes);
    if (status != cudaSuccess) (void)cudaFreeHost(host);
    check(status, "cudaMalloc");
    made.host = static_cast<char *>(host), made.device = static_cast<char *>(device);
    made.mapped = static_cast<char *>(mapped);
    return made;
}

cudaStream_t make_stream() {
    cudaStream_t made;
    check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    return made;
}

// Without memory if the device has none left: engines take almost all of it for their caches.
PackBuffer make_buffer() {
    PackBuffer buffer;
    void *memory = nullptr;
    if (cudaMalloc(&memory, kPacking) != cudaSuccess) {
        (void)cudaGetLastError();
        return buffer;
    }
    try {
        for (cudaEvent_t *event : {&buffer.full, &buffer.empty})
            check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreate");
    } catch (...) {
        if (buffer.full) (void)cudaEventDestroy(buffer.full);
        (void)cudaFree(memory);
        throw;
    }
    buffer.memory = static_cast<char *>(memory);
    return buffer;
}

}  // namespace

uint64_t count_devices() {
    int count = 0;
    check(cudaGetDeviceCount(&count), "no CUDA device");
    if (count <= 0) kvl::fail(KVLC_ENODEVICE, "no CUDA device: the driver reports none");
    return static_cast<uint64_t>(count);
}

Device &Device::get(uint64_t number) {
    std::lock_guard<std::mutex> guard(opening);
    if (number >= devices.size()) {
        uint64_t count = count_devices();
        if (number >= count)
            kvl::fail(KVL_EARGUMENT, "device %llu of %llu", ull(number), ull(count));
        devices.resize(count);
    }
    if (!devices[number]) devices[number].reset(new Device(number));
    return *devices[number];
}

uint64_t Device::known_crossover(uint64_t number, bool gather) {
    std::lock_guard<std::mutex> guard(opening);
    const bool is_known =
        number < devices.size() && devices[number] && devices[number]->measured_.load();
    return is_known ? devices[number]->crossovers_[!gather] : KVLC_MEASURED;
}

Device::Device(uint64_t number) : number_(number) {
    OnDevice on_device(number);
    int processors = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount,
                                 static_cast<int>(number)),
          "cudaDeviceGetAttribute");
    blocks_ = choose_blocks(processors);
    all_blocks_ = choose_all_blocks(processors);
    check(load_kernels(), "loading the kernels");
    // Making them later might wait for the device.
    for (int i = 0; i < kFirstStreams; i++) free_streams_.push_back(make_stream());
    for (int i = 0; i < kFirstStaging; i++) free_.push_back(make_staging(kStaging));
    send_crc_tables();
    // For a stream in each direction.
    for (int i = 0; i < kFirstBuffers; i++) {
        PackBuffer buffer = make_buffer();
        if (buffer.memory) free_buffers_.push_back(buffer);
    }
}

void Device::send_crc_tables() {
    CrcTables tables;
    fill_crc_tables(tables);
    const Staging &staging = free_.back();
    memcpy(staging.host, &tables, sizeof tables);
    void *memory = nullptr;
    check(cudaMalloc(&memory, sizeof tables), "cudaMalloc");
    cudaStream_t stream = staged_stream();
    check(cudaMemcpyAsync(memory, staging.host, sizeof tables, cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "sending tables");
    crc_tables_ = static_cast<const CrcTables *>(memory);
}

StreamSet &Device::stream_set(bool gather, cudaStream_t caller_stream) {
    std::lock_guard<std::mutex> guard(lock_);
    std::unique_ptr<StreamSet> &found = sets_[{gather, caller_stream}];
    if (!found) found = std::make_unique<StreamSet>(*this);
    return *found;
}

void Device::forget(cudaStream_t caller_stream) {
    std::lock_guard<std::mutex> guard(lock_);
    for (bool gather : {true, false}) sets_.erase({gather, caller_stream});
}

cudaStream_t Device::staged_stream() {
    std::lock_guard<std::mutex> guard(lock_);
    if (!staged_stream_) staged_stream_ = acquire_stream();
    return staged_stream_;
}

cudaStream_t Device::acquire_stream() {
    {
        std::lock_guard<std::mutex> guard(streams_lock_);
        if (!free_streams_.empty()) {
            cudaStream_t stream = free_streams_.back();
            free_streams_.pop_back();
            return stream;
        }
    }
    return make_stream();
}

void Device::release_stream(cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(streams_lock_);
    free_streams_.push_back(stream);
}

Staging Device::acquire_staging(size_t nbytes) {
    if (!nbytes) return {};
    {
        std::lock_guard<std::mutex> guard(lock_);
        for (auto found = free_.begin(); found != free_.end(); ++found)
            if (found->nbytes >= nbytes) {
                Staging staging = *found;
                free_.erase(found);
                return staging;
            }
    }
    return make_staging(nbytes);
}

void Device::release_staging(Staging staging) {
    if (!staging.nbytes) return;
    std::lock_guard<std::mutex> guard(lock_);
    free_.push_back(staging);
}

PackBuffer Device::acquire_buffer() {
    {
        std::lock_guard<std::mutex> guard(lock_);
        if (!free_buffers_.empty()) {
            PackBuffer buffer = free_buffers_.back();
            free_buffers_.pop_back();
            return buffer;
        }
    }
    return make_buffer();
}

void Device::release_buffer(PackBuffer buffer) {
    buffer.is_used = false;
    std::lock_guard<std::mutex> guard(lock_);
    free_buffers_.push_back(buffer);
}

cudaEvent_t Device::acquire_event(unsigned flags) {
    {
        std::lock_guard<std::mutex> guard(lock_);
        std::vector<cudaEvent_t> &known = free_events_[flags];
        if (!known.empty()) {
            cudaEvent_t event = known.back();
            known.pop_back();
            return event;
        }
    }
    cudaEvent_t event;
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreate");
    return event;
}

void Device::release_event(cudaEvent_t event, unsigned flags) {
    std::lock_guard<std::mutex> guard(lock_);
    free_events_[flags].push_back(event);
}

uint64_t Device::crossover(bool gather) {
    std::lock_guard<std::mutex> guard(measuring_);
    if (!measured_) {
        for (bool direction : {true, false}) crossovers_[!direction] = calibrate(*this, direction);
        measured_ = true;
    }
    return crossovers_[!gather];
}

}  // namespace kvlc
