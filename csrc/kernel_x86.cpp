// SPDX-License-Identifier: Apache-2.0
// AVX-512 and AVX2 by function-level targets, so that the library loads on every x86-64 processor.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

#include "kernel.h"

#if defined(__clang__) && __clang_major__ >= 14
#define KVL_CRC "sse4.2,crc32"  // a feature of its own there
#else
#define KVL_CRC "sse4.2"
#endif
#define KVL_AVX512 __attribute__((target("avx512f,pclmul," KVL_CRC)))
#define KVL_CLMUL __attribute__((target("avx512f,vpclmulqdq,pclmul," KVL_CRC)))
#define KVL_AVX2 __attribute__((target("avx2,pclmul," KVL_CRC)))
#define KVL_SSE42 __attribute__((target(KVL_CRC)))
#define KVL_JUMP __attribute__((target("pclmul," KVL_CRC)))

namespace kvl {
namespace {

// The addresses of a step in each lane.
struct Lanes {
    char *to[kLanes];
    const char *from[kLanes], *ahead[kLanes];

    Lanes(Dst dst, Src src, Src next, const Step &step) {
        for (int lane = 0; lane < kLanes; lane++) {
            to[lane] = dst ? dst[lane] + step.to : nullptr;
            from[lane] = src[lane] + step.from;
            ahead[lane] = next ? (step.behind ? next : src)[lane] + step.ahead : nullptr;
        }
    }
};

// The bytes are read again for the CRC: a first-level cache hit, and cheaper than extracting
// them from the vector registers. The four lanes' instructions alternate, so none waits for
// another.
KVL_SSE42 inline __attribute__((always_inline)) void crc_line(Src src, size_t at, uint64_t *crcs) {
    for (size_t word = 0; word < kLine; word += 8)
        for (int lane = 0; lane < kLanes; lane++) {
            uint64_t value;
            memcpy(&value, src[lane] + at + word, 8);
            crcs[lane] = _mm_crc32_u64(crcs[lane], value);
        }
}

// Carries the lanes' CRCs over a gap.
KVL_JUMP inline __attribute__((always_inline)) void jump(const Gap &gap, uint64_t *crcs) {
    const __m128i factor = _mm_cvtsi32_si128(int(gap.crc));
    for (int lane = 0; lane < kLanes; lane++) {
        __m128i crc = _mm_cvtsi64_si128(int64_t(crcs[lane]));
        __m128i product = _mm_clmulepi64_si128(crc, factor, 0);
        crcs[lane] = _mm_crc32_u64(0, uint64_t(_mm_cvtsi128_si64(product)));
    }
}

template <bool kStream, bool kDigest, bool kAhead>
KVL_AVX512 void lanes_avx512(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs,
                             Src next) {
    uint64_t crc[kLanes] = {};
    for (int lane = 0; lane < kLanes && kDigest; lane++) crc[lane] = crcs[lane];
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        if (kDigest && step->jumps) jump(step->gap, crc);
        for (size_t at = 0; at < step->nbytes; at += kLine) {
            for (int lane = 0; lane < kLanes; lane++) {
                if (kAhead) _mm_prefetch(here.ahead[lane] + at, _MM_HINT_T0);
                __m512i line = _mm512_loadu_si512(here.from[lane] + at);
                if (kStream)
                    _mm512_stream_si512(reinterpret_cast<__m512i *>(here.to[lane] + at), line);
                else
                    _mm512_storeu_si512(here.to[lane] + at, line);
            }
            if (kDigest) crc_line(here.from, at, crc);
        }
    }
    for (int lane = 0; lane < kLanes && kDigest; lane++)
        crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream, bool kDigest>
void copy_avx512(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next) {
    return next ? lanes_avx512<kStream, kDigest, true>(dst, src, steps, count, crcs, next)
                : lanes_avx512<kStream, kDigest, false>(dst, src, steps, count, crcs, next);
}

// Below this size the final reduction of a fold costs more than the fold saves.
constexpr size_t kFold = 1024;

// Copies one line of one lane and returns it; prefetches the one at `ahead`.
template <bool kStore, bool kStream, bool kAhead>
KVL_CLMUL inline __attribute__((always_inline)) __m512i pass(char *to, const char *from,
                                                             const char *ahead) {
    if (kAhead) _mm_prefetch(ahead, _MM_HINT_T0);
    __m512i line = _mm512_loadu_si512(from);
    if (kStore && kStream)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to), line);
    else if (kStore)
        _mm512_storeu_si512(to, line);
    return line;
}

KVL_CLMUL inline __attribute__((always_inline)) __m512i with_crc(__m512i line, uint32_t crc) {
    return _mm512_xor_si512(line, _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
}

// Shifts the folded value by one line and adds the line.
KVL_CLMUL inline __attribute__((always_inline)) __m512i add_line(__m512i folded, __m512i line,
                                                                 __m512i by_line) {
    __m512i low = _mm512_clmulepi64_epi128(folded, by_line, 0x00);
    __m512i high = _mm512_clmulepi64_epi128(folded, by_line, 0x11);
    return _mm512_ternarylogic_epi64(low, high, line, 0x96);  // xor of the three
}

// Copies and folds the CRC in the vector registers of the copy: two carry-less multiplications per
// line instead of eight CRC instructions. Without `kStore`, the CRC alone. Four variables instead
// of arrays, since compilers keep those in registers. n is at least one line.
template <bool kStore, bool kStream, bool kAhead>
KVL_CLMUL void fold(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next) {
    // x^(512 + 31) and x^(512 - 33) modulo the polynomial: the instruction's product of reflected
    // numbers is by x^33 too large.
    const __m512i by_line = _mm512_set4_epi32(0, int(0x9e4addf8), 0, 0x740eef02);
    __m512i folded0{}, folded1{}, folded2{}, folded3{};
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        char *to0 = here.to[0], *to1 = here.to[1], *to2 = here.to[2], *to3 = here.to[3];
        const char *from0 = here.from[0], *from1 = here.from[1];
        const char *from2 = here.from[2], *from3 = here.from[3];
        const char *ahead0 = here.ahead[0], *ahead1 = here.ahead[1];
        const char *ahead2 = here.ahead[2], *ahead3 = here.ahead[3];
        __m512i by_gap = by_line;
        if (step->jumps) {
            const uint32_t *folded = step->gap.folded;
            by_gap = _mm512_set4_epi32(0, int(folded[1]), 0, int(folded[0]));
        }
        if (step == steps) {
            folded0 = with_crc(pass<kStore, kStream, kAhead>(to0, from0, ahead0), crcs[0]);
            folded1 = with_crc(pass<kStore, kStream, kAhead>(to1, from1, ahead1), crcs[1]);
            folded2 = with_crc(pass<kStore, kStream, kAhead>(to2, from2, ahead2), crcs[2]);
            folded3 = with_crc(pass<kStore, kStream, kAhead>(to3, from3, ahead3), crcs[3]);
        } else {
            folded0 = add_line(folded0, pass<kStore, kStream, kAhead>(to0, from0, ahead0), by_gap);
            folded1 = add_line(folded1, pass<kStore, kStream, kAhead>(to1, from1, ahead1), by_gap);
            folded2 = add_line(folded2, pass<kStore, kStream, kAhead>(to2, from2, ahead2), by_gap);
            folded3 = add_line(folded3, pass<kStore, kStream, kAhead>(to3, from3, ahead3), by_gap);
        }
        for (size_t at = kLine; at < step->nbytes; at += kLine) {
            folded0 = add_line(
                folded0, pass<kStore, kStream, kAhead>(to0 + at, from0 + at, ahead0 + at), by_line);
            folded1 = add_line(
                folded1, pass<kStore, kStream, kAhead>(to1 + at, from1 + at, ahead1 + at), by_line);
            folded2 = add_line(
                folded2, pass<kStore, kStream, kAhead>(to2 + at, from2 + at, ahead2 + at), by_line);
            folded3 = add_line(
                folded3, pass<kStore, kStream, kAhead>(to3 + at, from3 + at, ahead3 + at), by_line);
        }
    }
    // The folded line has the CRC of all lines: hash it.
    alignas(kLine) char lines[kLanes][kLine];
    _mm512_store_si512(lines[0], folded0);
    _mm512_store_si512(lines[1], folded1);
    _mm512_store_si512(lines[2], folded2);
    _mm512_store_si512(lines[3], folded3);
    const char *const last[kLanes] = {lines[0], lines[1], lines[2], lines[3]};
    uint64_t crc[kLanes] = {};
    crc_line(last, 0, crc);
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream>
void copy_clmul(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next) {
    if (steps[count - 1].nbytes * count < kFold)
        return copy_avx512<kStream, true>(dst, src, steps, count, crcs, next);
    if (next) return fold<true, kStream, true>(dst, src, steps, count, crcs, next);
    fold<true, kStream, false>(dst, src, steps, count, crcs, next);
}

template <bool kStream, bool kDigest, bool kAhead>
KVL_AVX2 void lanes_avx2(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs,
                         Src next) {
    uint64_t crc[kLanes] = {};
    for (int lane = 0; lane < kLanes && kDigest; lane++) crc[lane] = crcs[lane];
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        if (kDigest && step->jumps) jump(step->gap, crc);
        for (size_t at = 0; at < step->nbytes; at += kLine) {
            for (int lane = 0; lane < kLanes; lane++) {
                if (kAhead) _mm_prefetch(here.ahead[lane] + at, _MM_HINT_T0);
                auto source = reinterpret_cast<const __m256i *>(here.from[lane] + at);
                auto target = reinterpret_cast<__m256i *>(here.to[lane] + at);
                __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
                if (kStream) {
                    _mm256_stream_si256(target, low);
                    _mm256_stream_si256(target + 1, high);
                } else {
                    _mm256_storeu_si256(target, low);
                    _mm256_storeu_si256(target + 1, high);
                }
            }
            if (kDigest) crc_line(here.from, at, crc);
        }
    }
    for (int lane = 0; lane < kLanes && kDigest; lane++)
        crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream, bool kDigest>
void copy_avx2(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next) {
    return next ? lanes_avx2<kStream, kDigest, true>(dst, src, steps, count, crcs, next)
                : lanes_avx2<kStream, kDigest, false>(dst, src, steps, count, crcs, next);
}

KVL_SSE42 void digest(Src src, size_t n, uint32_t *crcs) {
    const char *from[kLanes];
    uint64_t crc[kLanes];
    for (int lane = 0; lane < kLanes; lane++) from[lane] = src[lane], crc[lane] = crcs[lane];
    for (size_t at = 0; at < n; at += kLine) crc_line(from, at, crc);
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

void digest_clmul(Src src, size_t n, uint32_t *crcs) {
    if (n < kFold) return digest(src, n, crcs);
    const Step whole{0, 0, 0, uint32_t(n), false, false, {}};
    fold<false, false, false>(nullptr, src, &whole, 1, crcs, nullptr);
}

KVL_SSE42 uint32_t crc_sse42(uint32_t crc, const void *data, size_t n) {
    auto at = static_cast<const unsigned char *>(data);
    uint64_t wide = crc;
    for (; n >= 8; n -= 8, at += 8) {
        uint64_t value;
        memcpy(&value, at, 8);
        wide = _mm_crc32_u64(wide, value);
    }
    crc = static_cast<uint32_t>(wide);
    for (; n; n--) crc = _mm_crc32_u8(crc, *at++);
    return crc;
}

void fence() { _mm_sfence(); }

// The states of vector registers that the system saves: bits of XCR0.
constexpr unsigned kSavesAvx = 0x6, kSavesAvx512 = 0xe6;

// By CPUID: the runtimes of some compilers lack what __builtin_cpu_supports reads.
struct Processor {
    bool crc = false, avx2 = false, avx512 = false, clmul = false;

    Processor() {
        unsigned a, b, c, d, saved = 0;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        crc = (c & bit_SSE4_2) && (c & bit_PCLMUL);
        if (c & bit_OSXSAVE) asm("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        avx2 = (saved & kSavesAvx) == kSavesAvx && (b & bit_AVX2);
        avx512 = (saved & kSavesAvx512) == kSavesAvx512 && (b & bit_AVX512F);
        clmul = avx512 && (c & bit_VPCLMULQDQ);
    }
};

}  // namespace

const Kernel kAvx512 = {
    "avx512",
    copy_avx512<false, false>,
    copy_avx512<false, true>,
    copy_avx512<true, false>,
    copy_avx512<true, true>,
    true,
    digest,
    crc_sse42,
    fence,
};
const Kernel kAvx512Clmul = {
    "avx512+clmul",
    copy_avx512<false, false>,
    copy_clmul<false>,
    copy_avx512<true, false>,
    copy_clmul<true>,
    true,
    digest_clmul,
    crc_sse42,
    fence,
};
const Kernel kAvx2 = {
    "avx2",
    copy_avx2<false, false>,
    copy_avx2<false, true>,
    copy_avx2<true, false>,
    copy_avx2<true, true>,
    true,
    digest,
    crc_sse42,
    fence,
};

bool is_supported(const Kernel &kernel) {
    static const Processor here;
    return here.crc && (&kernel == &kAvx512Clmul ? here.clmul
                        : &kernel == &kAvx512    ? here.avx512
                                                 : here.avx2);
}

}  // namespace kvl
#endif
