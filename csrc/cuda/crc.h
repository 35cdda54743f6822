// SPDX-License-Identifier: Apache-2.0
// One thread's part of the digesting kernel; compiled for the device, and for the host's tests.
#pragma once

#include "unit.h"

namespace kvlc {

// Bytes in device memory, all of a chunk or a part of it.
struct CrcSpan {
    const char *start;
    uint64_t nbytes, first_piece;  // of the call
    uint32_t shift;  // what its register is multiplied by for the chunk's bytes behind it
    uint32_t chunk;  // whose register it adds to
};

constexpr uint32_t kCrcPoly = 0x82F63B78;  // Castagnoli, bits reflected
constexpr uint32_t kCrcOne = 1u << 31;     // the polynomial 1, in reflected order
constexpr uint64_t kCrcUnit = sizeof(Wide), kCrcWords = kCrcUnit / 4;
constexpr uint64_t kCrcRound = kCrcUnit * kThreads;  // bytes that a block reads at a time
constexpr uint64_t kCrcPiece = 8 * kCrcRound;        // bytes of a span that one block digests
constexpr uint64_t kCrcPieces = KVL_CHUNK / kCrcPiece;

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
constexpr uint32_t crc_zeros(uint64_t n) {
    uint32_t found = kCrcOne, power = kCrcOne >> 8;  // x to the 8th: a byte
    for (; n; n >>= 1) {
        if (n & 1) found = crc_product(power, found);
        power = crc_product(power, power);
    }
    return found;
}

// The register after byte b and k zero bytes: at once, and after the rest of a round; and what a
// register is multiplied by for the units of the threads behind one, and for so many pieces.
struct CrcTables {
    uint32_t next[4][256], round[4][256], behind[kThreads], pieces[kCrcPieces];
};

inline void fill_crc_tables(CrcTables &tables) {
    constexpr uint32_t rest = crc_zeros(kCrcRound - 4);
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int k = 0; k < 4; k++) {
            for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? kCrcPoly : 0);
            tables.next[k][byte] = crc;
            tables.round[k][byte] = crc_product(rest, crc);
        }
    }
    for (unsigned thread = 0; thread < kThreads; thread++)
        tables.behind[thread] = crc_zeros(kCrcUnit * (kThreads - 1 - thread));
    for (uint64_t pieces = 0; pieces < kCrcPieces; pieces++)
        tables.pieces[pieces] = crc_zeros(kCrcPiece * pieces);
}

KVLC_BOTH uint32_t crc_step(const uint32_t (&table)[4][256], uint32_t crc) {
    return table[3][crc & 255] ^ table[2][crc >> 8 & 255] ^ table[1][crc >> 16 & 255] ^
           table[0][crc >> 24];
}

KVLC_BOTH uint32_t crc_byte(const CrcTables &tables, uint32_t crc, uint32_t byte) {
    return (crc >> 8) ^ tables.next[0][(crc ^ byte) & 255];
}

// The register after single bytes, from 0.
KVLC_BOTH uint32_t crc_bytes(const CrcTables &tables, uintptr_t at, uintptr_t stop) {
    uint32_t crc = 0;
    for (; at < stop; at++)
        crc = crc_byte(tables, crc, *reinterpret_cast<const unsigned char *>(at));
    return crc;
}

// The aligned unit at an address, with zeros in place of its bytes before the span.
KVLC_BOTH Value<uint32_t> crc_unit(uintptr_t at, uintptr_t start) {
    Value<uint32_t> unit;
    if (at >= start) {
        unit.wide = *reinterpret_cast<const Wide *>(at);
        return unit;
    }
    for (unsigned word = 0; word < kCrcWords; word++) {
        unit.parts[word] = 0;
        for (unsigned k = 0; k < 4; k++)
            if (at + 4 * word + k >= start)
                unit.parts[word] |=
                    uint32_t(*reinterpret_cast<const unsigned char *>(at + 4 * word + k)) << 8 * k;
    }
    return unit;
}

inline uint64_t pieces_of(uint64_t nbytes) { return (nbytes + kCrcPiece - 1) / kCrcPiece; }

// What a thread contributes to a span: the XOR of all threads' is the register from 0 after it.
// Threads read neighbouring units, a round at a time, and keep a register for each word of theirs;
// zeros before the span, which change nothing, make its first round a whole one.
KVLC_BOTH uint32_t crc_part(uintptr_t start, uintptr_t stop, const CrcTables &tables,
                            unsigned thread) {
    const uintptr_t first = start / kCrcUnit * kCrcUnit, behind = stop / kCrcUnit * kCrcUnit;
    if (behind <= start) return thread ? 0 : crc_bytes(tables, start, stop);
    const auto units = int64_t((behind - first) / kCrcUnit);
    const int64_t rounds = (units + kThreads - 1) / kThreads;
    int64_t unit = int64_t(thread) - (rounds * kThreads - units);
    Value<uint32_t> crcs{};
    if (unit >= 0) crcs = crc_unit(first + kCrcUnit * uint64_t(unit), start);
    KVLC_UNROLL_4
    for (int64_t round = 1; round < rounds; round++) {
        unit += kThreads;
        Value<uint32_t> read;
        read.wide = *reinterpret_cast<const Wide *>(first + kCrcUnit * uint64_t(unit));
        KVLC_UNROLL
        for (unsigned word = 0; word < kCrcWords; word++)
            crcs.parts[word] = crc_step(tables.round, crcs.parts[word]) ^ read.parts[word];
    }
    uint32_t crc = 0;
    KVLC_UNROLL
    for (unsigned word = 0; word < kCrcWords; word++)
        crc = crc_step(tables.next, crc ^ crcs.parts[word]);
    crc = crc_product(crc, tables.behind[thread]);
    for (uintptr_t at = behind; at < stop; at++) crc = crc_byte(tables, crc, 0);
    return thread ? crc : crc ^ crc_bytes(tables, behind, stop);
}

// The span of a call's piece.
KVLC_BOTH const CrcSpan &span_of(const CrcSpan *spans, uint64_t count, uint64_t piece) {
    uint64_t low = 0;  // the last span that begins at or before the piece
    for (uint64_t high = count; high - low > 1;) {
        uint64_t middle = (low + high) / 2;
        (spans[middle].first_piece <= piece ? low : high) = middle;
    }
    return spans[low];
}

// What a thread contributes to a piece of a span, which are counted from the span's end; it is to
// be multiplied by `crc_shift`.
KVLC_BOTH uint32_t crc_piece(const CrcSpan &span, uint64_t piece, const CrcTables &tables,
                             unsigned thread) {
    const uint64_t stop = span.nbytes - (piece - span.first_piece) * kCrcPiece;
    const auto start = reinterpret_cast<uintptr_t>(span.start);
    return crc_part(start + (stop < kCrcPiece ? 0 : stop - kCrcPiece), start + stop, tables,
                    thread);
}

// What the register of a piece is multiplied by for the chunk's bytes behind it.
KVLC_BOTH uint32_t crc_shift(const CrcSpan &span, uint64_t piece, const CrcTables &tables) {
    return crc_product(span.shift, tables.pieces[piece - span.first_piece]);
}

// The CRC-32C of bytes, from the register after them that began with 0; `zeros` is crc_zeros of
// their number.
inline uint32_t crc_of_register(uint32_t crc, uint32_t zeros) {
    return ~(crc ^ crc_product(zeros, ~0u));
}

}  // namespace kvlc
