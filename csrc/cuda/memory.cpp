// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>
#include <cstring>

#include "kernel.h"
#include "pending.h"

namespace kvlc {
namespace {

using ull = unsigned long long;

struct Allocation {
    uint64_t nbytes, device;
};

std::mutex lock;
// Never destroyed: memory is freed by finalizers, to the end of the process.
auto &allocations = *new std::map<const char *, Allocation>;

// Staging memory, and a stream of the device's own. Work is over before either is given back.
class StagedWork {
  public:
    StagedWork(Device &device, size_t nbytes)
        : device_(device), stream_(device.staged_stream()),
          event_(device.acquire_event(kEventFlags)) {
        try {
            staging_ = device.acquire_staging(nbytes);
        } catch (...) {
            device_.release_event(event_, kEventFlags);
            throw;
        }
    }
    ~StagedWork() {
        if (!is_finished_) (void)cudaStreamSynchronize(stream_);
        device_.release_event(event_, kEventFlags);
        device_.release_staging(staging_);
    }
    StagedWork(const StagedWork &) = delete;
    StagedWork &operator=(const StagedWork &) = delete;

    char *host() const { return staging_.host; }
    char *mapped() const { return staging_.mapped; }
    char *device() const { return staging_.device; }
    cudaStream_t stream() const { return stream_; }

    void copy(void *to, const void *from, size_t nbytes, cudaMemcpyKind kind) {
        check(cudaMemcpyAsync(to, from, nbytes, kind, stream_), "cudaMemcpyAsync");
    }
    void finish() {
        check(cudaEventRecord(event_, stream_), "cudaEventRecord");
        check(cudaEventSynchronize(event_), "working on device memory");
        is_finished_ = true;
    }

  private:
    Device &device_;
    cudaStream_t stream_;
    cudaEvent_t event_;
    Staging staging_;
    bool is_finished_ = false;
};

}  // namespace

char *allocate_memory(uint64_t device, uint64_t nbytes) {
    if (!nbytes) kvl::fail(KVL_EARGUMENT, "no memory to allocate");
    Device::get(device);
    OnDevice on_device(device);
    void *found = nullptr;
    check(cudaMalloc(&found, nbytes), "cudaMalloc");
    auto address = static_cast<char *>(found);
    std::lock_guard<std::mutex> guard(lock);
    allocations[address] = {nbytes, device};
    return address;
}

void free_memory(char *address) {
    uint64_t device;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto known = allocations.find(address);
        if (known == allocations.end())
            kvl::fail(KVL_EARGUMENT, "no memory allocated at %p", static_cast<void *>(address));
        device = known->second.device;
        allocations.erase(known);
    }
    OnDevice on_device(device);
    check(cudaFree(address), "cudaFree");
}

bool is_allocated(const char *address, uint64_t nbytes, uint64_t device) {
    std::lock_guard<std::mutex> guard(lock);
    auto after = allocations.upper_bound(address);
    if (after == allocations.begin()) return false;
    const auto &[start, found] = *std::prev(after);
    if (nbytes > found.nbytes || uint64_t(address - start) > found.nbytes - nbytes) return false;
    if (found.device != device)
        kvl::fail(KVL_EARGUMENT, "a payload on device %llu, a copy on device %llu",
                  ull(found.device), ull(device));
    return true;
}

void read_memory(Device &device, const char *from, char *to, uint64_t nbytes) {
    if (!nbytes) return;
    StagedWork work(device, nbytes);
    work.copy(work.host(), from, nbytes, cudaMemcpyDeviceToHost);
    work.finish();
    memcpy(to, work.host(), nbytes);
}

void write_memory(Device &device, char *to, const char *from, uint64_t nbytes) {
    if (!nbytes) return;
    StagedWork work(device, nbytes);
    memcpy(work.host(), from, nbytes);
    work.copy(to, work.host(), nbytes, cudaMemcpyHostToDevice);
    work.finish();
}

void digest_memory(Device &device, const kvlc_bytes *spans, uint64_t count, uint32_t *crcs) {
    if (!count) return;
    Digests digests;
    for (uint64_t i = 0; i < count; i++)
        digests.add(digests.open(spans[i].nbytes), static_cast<const char *>(spans[i].address),
                    spans[i].nbytes, 0);
    const size_t pieces = digests.pieces(digests.spans().size());
    const size_t spans_nbytes = digests.spans().size() * sizeof(CrcSpan);
    const size_t done = spans_nbytes + count * sizeof(uint32_t);
    StagedWork work(device, done + sizeof(uint32_t));
    if (pieces) memcpy(work.host(), digests.spans().data(), spans_nbytes);
    memset(work.host() + spans_nbytes, 0, done + sizeof(uint32_t) - spans_nbytes);
    work.copy(work.device(), work.host(), done + sizeof(uint32_t), cudaMemcpyHostToDevice);
    auto words = [&](char *memory, size_t at) { return reinterpret_cast<uint32_t *>(memory + at); };
    const DigestCall call{reinterpret_cast<const CrcSpan *>(work.device()),
                          words(work.device(), spans_nbytes),
                          words(work.device(), done),
                          words(work.mapped(), spans_nbytes),
                          count,
                          pieces,
                          device.crc_tables()};
    if (pieces)
        check(launch_digest(call, digests.spans().size(), 0, pieces,
                            static_cast<unsigned>(std::min<uint64_t>(device.all_blocks(), pieces)),
                            work.stream()),
              "launching the digesting kernel");
    work.finish();
    digests.finish(words(work.host(), spans_nbytes), crcs);
}

}  // namespace kvlc
