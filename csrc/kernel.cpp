// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <atomic>
#include <cstring>

#include "crc32c.h"

namespace kvl {
namespace {

constexpr size_t kBlock = 4096;  // copied, then hashed while it is in the first-level cache

template <bool kDigest>
void copy(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src, bool) {
    for (int lane = 0; lane < kLanes; lane++)
        for (const Step *step = steps; step < steps + count; step++) {
            char *to = dst[lane] + step->to;
            const char *from = src[lane] + step->from;
            for (size_t at = 0; at < step->nbytes; at += kBlock) {
                size_t n = step->nbytes - at < kBlock ? step->nbytes - at : kBlock;
                memcpy(to + at, from + at, n);
                if (kDigest) crcs[lane] = crc_portable(crcs[lane], to + at, n);
            }
        }
}

void digest(Src src, size_t n, uint32_t *crcs) {
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = crc_portable(crcs[lane], src[lane], n);
}

void fence() { __sync_synchronize(); }

// The best first; the last runs on every processor.
const Kernel *const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Clmul,
    &kAvx512,
    &kAvx2,
#elif defined(__AARCH64EL__)
    &kNeon,
#endif
    &kPortable,
};

bool runs_here(const Kernel *kernel) { return kernel == &kPortable || is_supported(*kernel); }

const Kernel *find(const char *name) {
    for (const Kernel *kernel : kAll)
        if (runs_here(kernel) && (!strcmp(name, "auto") || !strcmp(name, kernel->name)))
            return kernel;
    return nullptr;
}

std::atomic<const Kernel *> current{nullptr};

}  // namespace

const Kernel kPortable = {
    "portable", 0,     copy<false>, copy<true>,   copy<false>,
    copy<true>, false, digest,      crc_portable, fence,
};

#if !defined(__x86_64__) && !defined(__AARCH64EL__)
bool is_supported(const Kernel &) { return false; }
#endif

const Kernel &kernel() {
    const Kernel *selected = current.load(std::memory_order_acquire);
    if (!selected) current.store(selected = find("auto"), std::memory_order_release);
    return *selected;
}

bool select_kernel(const char *name) {
    const Kernel *named = find(name);
    if (named) current.store(named, std::memory_order_release);
    return named != nullptr;
}

}  // namespace kvl
