// SPDX-License-Identifier: Apache-2.0
// The inner loops, one set for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvl {

// Four lanes, far apart in memory, advance together: the processor's prefetchers follow four
// streams, and four CRC registers hide the latency of the CRC instruction.
constexpr int kLanes = 4;
// Lanes advance by multiples of this many bytes: a cache line.
constexpr size_t kLine = 64;

using Dst = char *const *;
using Src = const char *const *;

// How far to prefetch ahead in a piece of n bytes: enough to hide the memory's latency, but no byte
// behind the next piece.
inline size_t distance(size_t n) { return n < 1024 ? n : n < 4096 ? 1024 : 2048; }

struct Kernel {
    const char *name;
    // Copy n bytes (a multiple of kLine) in each lane, and continue each lane's CRC. With `next`,
    // the address where each lane goes on to read, prefetch `distance(n)` bytes ahead. The stream
    // variants require destinations aligned to kLine.
    void (*copy)(Dst dst, Src src, size_t n, uint32_t *crcs, Src next);
    void (*copy_digest)(Dst dst, Src src, size_t n, uint32_t *crcs, Src next);
    void (*stream)(Dst dst, Src src, size_t n, uint32_t *crcs, Src next);
    void (*stream_digest)(Dst dst, Src src, size_t n, uint32_t *crcs, Src next);
    // The CRCs alone.
    void (*digest)(Src src, size_t n, uint32_t *crcs);
    // One CRC over any number of bytes.
    uint32_t (*crc)(uint32_t crc, const void *data, size_t n);
    // All stores become visible to others before any later store.
    void (*fence)();
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kAvx2;
extern const Kernel kAvx512;
extern const Kernel kAvx512Clmul;
#elif defined(__AARCH64EL__)
extern const Kernel kNeon;
#endif
// Whether this processor has the instructions of one that is not portable.
bool is_supported(const Kernel &kernel);

// The selected one; by default the best that this processor supports.
const Kernel &kernel();
// Returns false if there is none of this name, or this processor does not support it.
bool select_kernel(const char *name);

}  // namespace kvl
