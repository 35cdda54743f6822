// SPDX-License-Identifier: Apache-2.0
// CRC-32C in software, and the arithmetic that joins the CRCs of neighbouring spans.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvl {

// All functions work on the raw register: a standard CRC starts with ~0 and is inverted at the end.
constexpr uint32_t kCrcStart = ~0u;

// Continue `crc` over `n` bytes, eight at a time from tables.
uint32_t crc_portable(uint32_t crc, const void *data, size_t n);

// The operator that shifts a CRC by `n` zero bytes; apply it with `crc_multiply`.
uint32_t crc_shift(size_t n);

// x to the power of `bits`, which may be negative: back by so many bits.
uint32_t crc_power(int64_t bits);

// Product of two polynomials modulo CRC-32C's.
uint32_t crc_multiply(uint32_t a, uint32_t b);

}  // namespace kvl
