// SPDX-License-Identifier: Apache-2.0
#include "kernel.h"

#include <atomic>
#include <cstring>

#if defined(__AARCH64EL__)
#include <sys/auxv.h>
#endif

#include "crc32c.h"

namespace kvl {
namespace {

constexpr size_t kStep = 4096;  // copied, then hashed while it is in the first-level cache

template <bool kDigest>
void copy(Dst dst, Src src, size_t n, uint32_t *crcs) {
    for (int lane = 0; lane < kLanes; lane++)
        for (size_t at = 0; at < n; at += kStep) {
            size_t step = n - at < kStep ? n - at : kStep;
            memcpy(dst[lane] + at, src[lane] + at, step);
            if (kDigest) crcs[lane] = crc_portable(crcs[lane], dst[lane] + at, step);
        }
}

void digest(Src src, size_t n, uint32_t *crcs) {
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = crc_portable(crcs[lane], src[lane], n);
}

void fence() { std::atomic_thread_fence(std::memory_order_release); }

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

bool runs_here(const Kernel *kernel) {
#if defined(__x86_64__)
    bool crc = __builtin_cpu_supports("sse4.2"), wide = __builtin_cpu_supports("avx512f");
    if (kernel == &kAvx512Clmul) return crc && wide && __builtin_cpu_supports("vpclmulqdq");
    if (kernel == &kAvx512) return crc && wide;
    if (kernel == &kAvx2) return crc && __builtin_cpu_supports("avx2");
#elif defined(__AARCH64EL__)
    if (kernel == &kNeon) return getauxval(AT_HWCAP) & HWCAP_CRC32;
#endif
    return kernel == &kPortable;
}

const Kernel *find(const char *name) {
    for (const Kernel *kernel : kAll)
        if (runs_here(kernel) && (!strcmp(name, "auto") || !strcmp(name, kernel->name)))
            return kernel;
    return nullptr;
}

std::atomic<const Kernel *> current{nullptr};

}  // namespace

const Kernel kPortable = {
    "portable", copy<false>, copy<true>, copy<false>, copy<true>, digest, crc_portable, fence,
};

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
