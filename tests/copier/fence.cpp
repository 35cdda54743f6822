// SPDX-License-Identifier: Apache-2.0
// Runs copies with a kernel that notes its calls: after its last store each thread must fence.
#include <cstdio>
#include <mutex>
#include <vector>

#include "kernel.cpp"  // for `current`
#include "kvlink.h"

namespace {

thread_local bool stored_since_fence = false;
std::mutex mutex;
int stores = 0, unfenced = 0;

struct ThreadEnd {
    ~ThreadEnd() {
        std::lock_guard<std::mutex> lock(mutex);
        unfenced += stored_since_fence;
    }
};

void store(kvl::Dst dst, kvl::Src src, const kvl::Step *steps, size_t count, uint32_t *crcs,
           kvl::Src next, bool near) {
    thread_local ThreadEnd end;
    (void)end;
    stored_since_fence = true;
    {
        std::lock_guard<std::mutex> lock(mutex);
        stores++;
    }
    kvl::kPortable.stream(dst, src, steps, count, crcs, next, near);
}

void fence() { stored_since_fence = false; }

}  // namespace

int main() {
    kvl::Kernel counting = kvl::kPortable;
    counting.stream = counting.stream_digest = store;
    counting.fence = fence;
    kvl::current.store(&counting);

    const uint64_t nbytes = 16 << 20;
    std::vector<char> payload(nbytes + 64), tensor(nbytes + 64, 1);
    auto aligned = [](std::vector<char> &bytes) {
        return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
    };
    kvl_copy copy{};
    copy.view = {aligned(tensor), nbytes, 0, nbytes, {1, 1, 1, 1}, {0, 0, 0, 0}, nullptr, 0, 1, 0};
    copy.span = {0, nbytes, KVL_NO_DIGEST};
    int calls = 0;
    for (uint64_t threads : {1, 2, 3}) {
        kvl_options options{threads, KVL_STORES_STREAM, 0};
        int before = stores;
        if (kvl_gather(aligned(payload), nbytes, &copy, 1, nullptr, 0, &options, nullptr) != KVL_OK)
            std::printf("%s\n", kvl_last_error());
        // The calling thread has not ended: what it noted must be clear when the call returns.
        if (stores > before && !stored_since_fence && !unfenced) calls++;
        stored_since_fence = false;
    }
    std::printf("each of %d calls: stored, then fenced\n", calls);
}
