// SPDX-License-Identifier: Apache-2.0
// One thread's part of the digesting kernel; compiled for the device, and for the host's tests.
#pragma once

#include "unit.h"

namespace kvlc {

// Bytes in device memory whose CRC-32C is computed.
struct CrcSpan {
    const char *start;
    uint64_t nbytes;
};

constexpr uint32_t kCrcPoly = 0x82F63B78;        // Castagnoli, bits reflected
constexpr uint32_t kCrcOne = 1u << 31;           // the polynomial 1, in reflected order
constexpr uint64_t kCrcRound = 4ull * kThreads;  // bytes that a block reads at a time

// Product of two polynomials modulo the CRC's.
KVLC_BOTH constexpr uint32_t crc_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kCrcOne; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kCrcPoly : 0);
    }
    return product;
}

// What a register is multiplied by for `n` zero bytes.
KVLC_BOTH constexpr uint32_t crc_zeros(uint64_t n) {
    uint32_t found = kCrcOne, power = kCrcOne >> 8;  // x to the 8th: a byte
    for (; n; n >>= 1) {
        if (n & 1) found = crc_product(power, found);
        power = crc_product(power, power);
    }
    return found;
}

// The register after byte b and k zero bytes: at once, and after the rest of a round.
struct CrcTables {
    uint32_t next[4][256], round[4][256];
};

constexpr uint32_t kCrcRest = crc_zeros(kCrcRound - 4);
static_assert(kThreads == 256, "each thread fills the entries of one byte");

KVLC_BOTH void fill_crc_tables(CrcTables &tables, unsigned byte) {
    uint32_t crc = byte;
    for (int k = 0; k < 4; k++) {
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? kCrcPoly : 0);
        tables.next[k][byte] = crc;
        tables.round[k][byte] = crc_product(kCrcRest, crc);
    }
}

KVLC_BOTH uint32_t crc_step(const uint32_t (&table)[4][256], uint32_t crc) {
    return table[3][crc & 255] ^ table[2][crc >> 8 & 255] ^ table[1][crc >> 16 & 255] ^
           table[0][crc >> 24];
}

// The register after single bytes, from 0.
KVLC_BOTH uint32_t crc_bytes(const CrcTables &tables, uintptr_t at, uintptr_t stop) {
    uint32_t crc = 0;
    for (; at < stop; at++)
        crc =
            (crc >> 8) ^ tables.next[0][(crc ^ *reinterpret_cast<const unsigned char *>(at)) & 255];
    return crc;
}

// The aligned word at an address, without its bytes before the span.
KVLC_BOTH uint32_t crc_word(uintptr_t at, uintptr_t start) {
    if (at >= start) return *reinterpret_cast<const uint32_t *>(at);
    uint32_t word = 0;
    for (uintptr_t k = start - at; k < 4; k++)
        word |= uint32_t(*reinterpret_cast<const unsigned char *>(at + k)) << 8 * k;
    return word;
}

// What a thread contributes to a span: the XOR of all threads' is the register from 0 after it.
// Threads read neighbouring words, a round at a time; zeros before the span, which change nothing,
// make its first round a whole one.
KVLC_BOTH uint32_t crc_part(const CrcSpan &span, const CrcTables &tables, unsigned thread) {
    const auto start = reinterpret_cast<uintptr_t>(span.start), stop = start + span.nbytes;
    const uintptr_t first = start & ~uintptr_t(3), behind = stop & ~uintptr_t(3);
    if (behind <= start) return thread ? 0 : crc_bytes(tables, start, stop);
    const auto words = int64_t((behind - first) / 4);
    const int64_t rounds = (words + kThreads - 1) / kThreads;
    int64_t word = int64_t(thread) - (rounds * kThreads - words);
    uint32_t crc = word >= 0 ? crc_word(first + 4 * uint64_t(word), start) : 0;
    for (int64_t round = 1; round < rounds; round++) {
        word += kThreads;
        crc = crc_step(tables.round, crc) ^ crc_word(first + 4 * uint64_t(word), start);
    }
    crc = crc_step(tables.next, crc);
    crc = crc_product(crc, crc_zeros(4 * uint64_t(kThreads - 1 - thread) + (stop - behind)));
    return thread ? crc : crc ^ crc_bytes(tables, behind, stop);
}

// The CRC-32C of `nbytes` bytes, from the register after them that began with 0.
KVLC_BOTH uint32_t crc_of_register(uint32_t crc, uint64_t nbytes) {
    return ~(crc ^ crc_product(crc_zeros(nbytes), ~0u));
}

}  // namespace kvlc
