// SPDX-License-Identifier: Apache-2.0
// AVX-512 and AVX2 by function-level targets, so that the library loads on every x86-64 processor.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#include <cstring>

#include "delay.h"
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

// One line of each lane. Variables instead of an array, since compilers keep those in registers.
struct Lines {
    __m512i of0, of1, of2, of3;
};

template <bool kAhead>
KVL_AVX512 inline __attribute__((always_inline)) Lines load(const Lanes &here, size_t at) {
    for (int lane = 0; kAhead && lane < kLanes; lane++)
        _mm_prefetch(here.ahead[lane] + at, _MM_HINT_T0);
    return {_mm512_loadu_si512(here.from[0] + at), _mm512_loadu_si512(here.from[1] + at),
            _mm512_loadu_si512(here.from[2] + at), _mm512_loadu_si512(here.from[3] + at)};
}

template <bool kStream>
KVL_AVX512 inline __attribute__((always_inline)) void store(char *to, __m512i line) {
    if (kStream)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to), line);
    else
        _mm512_storeu_si512(to, line);
}

template <bool kStream>
KVL_AVX512 inline __attribute__((always_inline)) void store(Dst to, ptrdiff_t at,
                                                            const Lines &lines) {
    store<kStream>(to[0] + at, lines.of0);
    store<kStream>(to[1] + at, lines.of1);
    store<kStream>(to[2] + at, lines.of2);
    store<kStream>(to[3] + at, lines.of3);
}

// Lines that are loaded and not yet stored: with `kNear`, two of each lane, else none.
struct Late {
    Delay<Lines> one, two;
};

// Load a line of each lane, and store what is due.
template <bool kStream, bool kAhead, bool kNear>
KVL_AVX512 inline __attribute__((always_inline)) Lines pass(const Lanes &here, Dst dst, size_t at,
                                                            ptrdiff_t to, Late &late) {
    const Lines loaded = load<kAhead>(here, at);
    Lines due = loaded;
    to += ptrdiff_t(at);
    if (!kNear)
        store<kStream>(here.to, ptrdiff_t(at), loaded);
    else if (late.one.exchange(due, to) && late.two.exchange(due, to))
        store<kStream>(dst, to, due);
    return loaded;
}

template <bool kStream>
KVL_AVX512 inline __attribute__((always_inline)) void finish(Dst dst, const Late &late) {
    Lines due;
    ptrdiff_t to;
    if (late.two.take(due, to)) store<kStream>(dst, to, due);
    if (late.one.take(due, to)) store<kStream>(dst, to, due);
}

template <bool kStream, bool kDigest, bool kAhead, bool kNear>
KVL_AVX512 void lanes_avx512(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs,
                             Src next) {
    Late late;
    uint64_t crc[kLanes] = {};
    for (int lane = 0; lane < kLanes && kDigest; lane++) crc[lane] = crcs[lane];
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        if (kDigest && step->jumps) jump(step->gap, crc);
        for (size_t at = 0; at < step->nbytes; at += kLine) {
            if (kDigest) crc_line(here.from, at, crc);
            pass<kStream, kAhead, kNear>(here, dst, at, step->to, late);
        }
    }
    if (kNear) finish<kStream>(dst, late);
    for (int lane = 0; lane < kLanes && kDigest; lane++)
        crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream, bool kDigest>
void copy_avx512(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next,
                 bool near) {
    auto copy = near ? (next ? lanes_avx512<kStream, kDigest, true, true>
                             : lanes_avx512<kStream, kDigest, false, true>)
                     : (next ? lanes_avx512<kStream, kDigest, true, false>
                             : lanes_avx512<kStream, kDigest, false, false>);
    copy(dst, src, steps, count, crcs, next);
}

// Below this size the final reduction of a fold costs more than the fold saves.
constexpr size_t kFold = 1024;

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

KVL_CLMUL inline __attribute__((always_inline)) Lines add_lines(const Lines &folded,
                                                                const Lines &lines,
                                                                __m512i by_line) {
    return {add_line(folded.of0, lines.of0, by_line), add_line(folded.of1, lines.of1, by_line),
            add_line(folded.of2, lines.of2, by_line), add_line(folded.of3, lines.of3, by_line)};
}

// Copies and folds the CRC in the vector registers of the copy: two carry-less multiplications per
// line instead of eight CRC instructions. Without `kStore`, the CRC alone. n is at least one line.
template <bool kStore, bool kStream, bool kAhead, bool kNear>
KVL_CLMUL void fold(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next) {
    // x^(512 + 31) and x^(512 - 33) modulo the polynomial: the instruction's product of reflected
    // numbers is by x^33 too large.
    const __m512i by_line = _mm512_set4_epi32(0, int(0x9e4addf8), 0, 0x740eef02);
    Late late;
    Lines lines, folded{};
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        lines = kStore ? pass<kStream, kAhead, kNear>(here, dst, 0, step->to, late)
                       : load<kAhead>(here, 0);
        if (step == steps) {
            folded = {with_crc(lines.of0, crcs[0]), with_crc(lines.of1, crcs[1]),
                      with_crc(lines.of2, crcs[2]), with_crc(lines.of3, crcs[3])};
        } else if (step->jumps) {
            const uint32_t *by = step->gap.folded;
            folded = add_lines(folded, lines, _mm512_set4_epi32(0, int(by[1]), 0, int(by[0])));
        } else {
            folded = add_lines(folded, lines, by_line);
        }
        for (size_t at = kLine; at < step->nbytes; at += kLine) {
            lines = kStore ? pass<kStream, kAhead, kNear>(here, dst, at, step->to, late)
                           : load<kAhead>(here, at);
            folded = add_lines(folded, lines, by_line);
        }
    }
    if (kStore && kNear) finish<kStream>(dst, late);
    // The folded line has the CRC of all lines: hash it.
    alignas(kLine) char last[kLanes][kLine];
    char *const addresses[kLanes] = {last[0], last[1], last[2], last[3]};
    store<false>(addresses, 0, folded);
    uint64_t crc[kLanes] = {};
    crc_line(addresses, 0, crc);
    for (int lane = 0; lane < kLanes; lane++) crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream>
void copy_clmul(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next,
                bool near) {
    if (steps[count - 1].nbytes * count < kFold)
        return copy_avx512<kStream, true>(dst, src, steps, count, crcs, next, near);
    auto copy = near
                    ? (next ? fold<true, kStream, true, true> : fold<true, kStream, false, true>)
                    : (next ? fold<true, kStream, true, false> : fold<true, kStream, false, false>);
    copy(dst, src, steps, count, crcs, next);
}

// One line of each lane.
struct Halves {
    __m256i low0, high0, low1, high1, low2, high2, low3, high3;
};

template <bool kAhead>
KVL_AVX2 inline __attribute__((always_inline)) Halves load_halves(const Lanes &here, size_t at) {
    const __m256i *line[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
        if (kAhead) _mm_prefetch(here.ahead[lane] + at, _MM_HINT_T0);
        line[lane] = reinterpret_cast<const __m256i *>(here.from[lane] + at);
    }
    return {_mm256_loadu_si256(line[0]), _mm256_loadu_si256(line[0] + 1),
            _mm256_loadu_si256(line[1]), _mm256_loadu_si256(line[1] + 1),
            _mm256_loadu_si256(line[2]), _mm256_loadu_si256(line[2] + 1),
            _mm256_loadu_si256(line[3]), _mm256_loadu_si256(line[3] + 1)};
}

template <bool kStream>
KVL_AVX2 inline __attribute__((always_inline)) void store(char *to, __m256i low, __m256i high) {
    auto target = reinterpret_cast<__m256i *>(to);
    if (kStream) {
        _mm256_stream_si256(target, low);
        _mm256_stream_si256(target + 1, high);
    } else {
        _mm256_storeu_si256(target, low);
        _mm256_storeu_si256(target + 1, high);
    }
}

template <bool kStream>
KVL_AVX2 inline __attribute__((always_inline)) void store(Dst to, ptrdiff_t at,
                                                          const Halves &lines) {
    store<kStream>(to[0] + at, lines.low0, lines.high0);
    store<kStream>(to[1] + at, lines.low1, lines.high1);
    store<kStream>(to[2] + at, lines.low2, lines.high2);
    store<kStream>(to[3] + at, lines.low3, lines.high3);
}

// With `kNear`, two lines of each lane fill the registers.
template <bool kStream, bool kDigest, bool kAhead, bool kNear>
KVL_AVX2 void lanes_avx2(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs,
                         Src next) {
    Delay<Halves> one;
    Halves lines;
    ptrdiff_t to;
    uint64_t crc[kLanes] = {};
    for (int lane = 0; lane < kLanes && kDigest; lane++) crc[lane] = crcs[lane];
    for (const Step *step = steps; step < steps + count; step++) {
        const Lanes here(dst, src, kAhead ? next : nullptr, *step);
        if (kDigest && step->jumps) jump(step->gap, crc);
        for (size_t at = 0; at < step->nbytes; at += kLine) {
            if (kDigest) crc_line(here.from, at, crc);
            lines = load_halves<kAhead>(here, at);
            to = step->to + ptrdiff_t(at);
            if (!kNear)
                store<kStream>(here.to, ptrdiff_t(at), lines);
            else if (one.exchange(lines, to))
                store<kStream>(dst, to, lines);
        }
    }
    if (kNear && one.take(lines, to)) store<kStream>(dst, to, lines);
    for (int lane = 0; lane < kLanes && kDigest; lane++)
        crcs[lane] = static_cast<uint32_t>(crc[lane]);
}

template <bool kStream, bool kDigest>
void copy_avx2(Dst dst, Src src, const Step *steps, size_t count, uint32_t *crcs, Src next,
               bool near) {
    auto copy = near ? (next ? lanes_avx2<kStream, kDigest, true, true>
                             : lanes_avx2<kStream, kDigest, false, true>)
                     : (next ? lanes_avx2<kStream, kDigest, true, false>
                             : lanes_avx2<kStream, kDigest, false, false>);
    copy(dst, src, steps, count, crcs, next);
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
    fold<false, false, false, false>(nullptr, src, &whole, 1, crcs, nullptr);
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
    2 * kLine,
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
    2 * kLine,
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
    kLine,
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
