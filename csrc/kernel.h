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

// Factors that carry a CRC over a gap between two steps, which may be negative: powers of x.
struct Gap {
    uint32_t folded[2];  // by a line and the gap, in the order of the carry-less multiplication
    uint32_t crc;        // by the gap alone, for a multiplication and a CRC instruction
};

// A run of bytes that every lane copies, by its distance from the lane's addresses.
struct Step {
    ptrdiff_t from, to;
    // What to prefetch meanwhile: as many bytes from there on, of the lane's source or, with
    // `behind`, of `next`.
    ptrdiff_t ahead;
    uint32_t nbytes;  // a multiple of kLine
    bool behind;
    bool jumps;  // whether there is a gap in the payload between it and the step before
    Gap gap;
};

struct Kernel {
    const char *name;
    // Where a load follows a store whose address has the same low 12 bits, some processors have it
    // wait until the store is done, which takes long past the cache. So all loads of a line, in all
    // lanes and for the CRC, too, come before its stores; with `near`, so do those of the next
    // bytes, so many. Calls are to be near if a target lies 1 to so many bytes behind a source, by
    // these bits; further behind, a load follows two lines after the store or more.
    uint32_t near;
    // Copy the steps in each lane, and continue each lane's CRC over them. With `next`, the address
    // where each lane goes on to read, prefetch. The stream variants require destinations aligned
    // to kLine.
    using Copy = void (*)(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs,
                          Src next, bool near);
    Copy copy, copy_digest, stream, stream_digest;
    // Whether it carries CRCs over gaps: else steps come in the payload's order.
    bool jumps;
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
