// SPDX-License-Identifier: Apache-2.0
// NEON and the CRC instructions, by function-level targets: every 64-bit Arm processor has the
// first, and the second is looked for before this kernel is selected.
#if defined(__AARCH64EL__)
#include <arm_acle.h>
#include <arm_neon.h>
#include <sys/auxv.h>

#include <cstring>

#include "kernel.h"

#if defined(__clang__)
#define KVL_CRC __attribute__((target("crc")))
#else
#define KVL_CRC __attribute__((target("+crc")))
#endif

namespace kvl {
namespace {

inline __attribute__((always_inline)) uint64_t word_at(const char *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

// The bytes are read again for the CRC: a first-level cache hit. The four lanes' instructions
// alternate, so none waits for another.
KVL_CRC inline __attribute__((always_inline)) void crc_line(Src src, size_t at, uint32_t *crcs) {
    for (size_t word = 0; word < kLine; word += 8)
        for (int lane = 0; lane < kLanes; lane++)
            crcs[lane] = __crc32cd(crcs[lane], word_at(src[lane] + at + word));
}

// STNP hints that the line will not be read soon: a processor may write it past its caches.
inline __attribute__((always_inline)) void stream_line(char *to, const uint8x16x4_t &line) {
    asm volatile(
        "stnp %q0, %q1, [%4]\n\t"
        "stnp %q2, %q3, [%4, #32]"
        :
        : "w"(line.val[0]), "w"(line.val[1]), "w"(line.val[2]), "w"(line.val[3]), "r"(to)
        : "memory");
}

inline __attribute__((always_inline)) uint8x16x4_t load(const char *from) {
    return vld1q_u8_x4(reinterpret_cast<const uint8_t *>(from));
}

template <bool kStream>
inline __attribute__((always_inline)) void store(char *to, const uint8x16x4_t &line) {
    if (kStream)
        stream_line(to, line);
    else
        vst1q_u8_x4(reinterpret_cast<uint8_t *>(to), line);
}

template <bool kStream, bool kDigest>
KVL_CRC void lanes(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src, bool) {
    uint32_t crc[kLanes] = {};
    for (int lane = 0; lane < kLanes && kDigest; lane++) crc[lane] = crcs[lane];
    for (const Step *step = steps; step < steps + count; step++) {
        char *to[kLanes];
        const char *from[kLanes];
        for (int lane = 0; lane < kLanes; lane++)
            to[lane] = dst[lane] + step->to, from[lane] = src[lane] + step->from;
        for (size_t at = 0; at < step->nbytes; at += kLine) {
            const uint8x16x4_t line0 = load(from[0] + at), line1 = load(from[1] + at);
            const uint8x16x4_t line2 = load(from[2] + at), line3 = load(from[3] + at);
            if (kDigest) crc_line(from, at, crc);
            store<kStream>(to[0] + at, line0);
            store<kStream>(to[1] + at, line1);
            store<kStream>(to[2] + at, line2);
            store<kStream>(to[3] + at, line3);
        }
    }
    if (kDigest)
        for (int lane = 0; lane < kLanes; lane++) crcs[lane] = crc[lane];
}

KVL_CRC void digest(Src src, size_t n, uint32_t *crcs) {
    const char *from[kLanes];
    uint32_t crc[kLanes];
    for (int lane = 0; lane < kLanes; lane++) from[lane] = src[lane], crc[lane] = crcs[lane];
    for (size_t at = 0; at < n; at += kLine) crc_line(from, at, crc);
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = crc[lane];
}

KVL_CRC uint32_t crc_of(uint32_t crc, const void *data, size_t n) {
    auto at = static_cast<const char *>(data);
    for (; n >= 8; n -= 8, at += 8) crc = __crc32cd(crc, word_at(at));
    for (; n; n--) crc = __crc32cb(crc, static_cast<uint8_t>(*at++));
    return crc;
}

void fence() { __sync_synchronize(); }

}  // namespace

const Kernel kNeon = {
    "neon",
    0,
    lanes<false, false>,
    lanes<false, true>,
    lanes<true, false>,
    lanes<true, true>,
    false,
    digest,
    crc_of,
    fence,
};

bool is_supported(const Kernel &) { return getauxval(AT_HWCAP) & HWCAP_CRC32; }

}  // namespace kvl
#endif
