// SPDX-License-Identifier: Apache-2.0
#include "pinned.h"

#include <map>
#include <mutex>

#include "runtime.h"

namespace kvlc {
namespace {

using ull = unsigned long long;

struct Span {
    uint64_t nbytes, device;
    bool readonly;
};

std::mutex lock;
std::map<char *, Span> spans;  // by address

// The last span that begins at or before `address`, or the end.
auto span_at(const char *address) {
    auto after = spans.upper_bound(const_cast<char *>(address));
    return after == spans.begin() ? spans.end() : std::prev(after);
}

bool overlaps_another(const char *address, uint64_t nbytes) {
    auto before = span_at(address);
    if (before != spans.end() && before->first + before->second.nbytes > address) return true;
    auto after = spans.upper_bound(const_cast<char *>(address));
    return after != spans.end() && after->first < address + nbytes;
}

unsigned flags_for(uint64_t device, bool readonly) {
    unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (!readonly) return flags;
    int supported = 0;
    check(cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported,
                                 static_cast<int>(device)),
          "cudaDeviceGetAttribute");
    if (!supported)
        kvl::fail(KVLC_EPAGEABLE,
                  "this device cannot register readonly memory; a newer driver may");
    return flags | cudaHostRegisterReadOnly;
}

}  // namespace

void register_memory(uint64_t device, char *address, uint64_t nbytes, bool readonly) {
    if (!address || !nbytes) kvl::fail(KVL_EARGUMENT, "no memory to register");
    std::lock_guard<std::mutex> guard(lock);
    auto known = spans.find(address);
    if (known != spans.end() && known->second.nbytes == nbytes &&
        known->second.readonly == readonly)
        return;
    if (overlaps_another(address, nbytes))
        kvl::fail(KVL_EOVERLAP, "%llu bytes that meet a span registered before", ull(nbytes));
    OnDevice on_device(device);
    unsigned flags = flags_for(device, readonly);
    cudaError_t status = cudaHostRegister(address, nbytes, flags);
    if (status != cudaSuccess) {
        (void)cudaGetLastError();
        kvl::fail(KVLC_EPAGEABLE,
                  "cudaHostRegister of %llu bytes: %s; raise the limit of locked memory "
                  "(ulimit -l unlimited)",
                  ull(nbytes), cudaGetErrorString(status));
    }
    spans[address] = {nbytes, device, readonly};
}

void unregister_memory(char *address) {
    std::lock_guard<std::mutex> guard(lock);
    auto known = spans.find(address);
    if (known == spans.end()) kvl::fail(KVL_EARGUMENT, "no span registered at %p", address);
    uint64_t device = known->second.device;
    spans.erase(known);
    OnDevice on_device(device);
    check(cudaHostUnregister(address), "cudaHostUnregister");
}

void check_registered(const char *address, uint64_t nbytes, bool writing) {
    std::lock_guard<std::mutex> guard(lock);
    auto span = span_at(address);
    if (span == spans.end() || nbytes > span->second.nbytes ||
        uint64_t(address - span->first) > span->second.nbytes - nbytes)
        kvl::fail(KVLC_EPAGEABLE, "a payload of %llu bytes outside registered memory", ull(nbytes));
    if (writing && span->second.readonly)
        kvl::fail(KVLC_EPAGEABLE, "a payload in memory that was registered readonly");
}

ptrdiff_t device_shift(const char *address) {
    void *found = nullptr;
    check(cudaHostGetDevicePointer(&found, const_cast<char *>(address), 0),
          "cudaHostGetDevicePointer");
    return static_cast<char *>(found) - address;
}

}  // namespace kvlc
