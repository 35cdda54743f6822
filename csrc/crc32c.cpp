// SPDX-License-Identifier: Apache-2.0
#include "crc32c.h"

#include <cstring>

namespace kvl {
namespace {

constexpr uint32_t kPoly = 0x82F63B78;              // Castagnoli, bits reflected
constexpr uint32_t kOne = 1u << 31;                 // the polynomial 1, in reflected order
constexpr int64_t kOrder = (int64_t(1) << 31) - 1;  // x to this power is 1

struct Tables {
    uint32_t bytes[8][256];  // bytes[k][b]: the CRC of byte b followed by k zero bytes
    uint32_t powers[31];     // powers[k]: x to the 2^k
    Tables() {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? kPoly : 0);
            bytes[0][byte] = crc;
        }
        for (int k = 1; k < 8; k++)
            for (int byte = 0; byte < 256; byte++) {
                uint32_t before = bytes[k - 1][byte];
                bytes[k][byte] = (before >> 8) ^ bytes[0][before & 255];
            }
        powers[0] = kOne >> 1;
        for (int k = 1; k < 31; k++) powers[k] = crc_multiply(powers[k - 1], powers[k - 1]);
    }
};

const Tables &tables() {
    static const Tables made;
    return made;
}

}  // namespace

uint32_t crc_multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = kOne; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kPoly : 0);
    }
    return product;
}

uint32_t crc_power(int64_t bits) {
    const Tables &t = tables();
    uint32_t power = kOne;
    uint64_t n = uint64_t((bits % kOrder + kOrder) % kOrder);
    for (int k = 0; n; n >>= 1, k++)
        if (n & 1) power = crc_multiply(t.powers[k], power);
    return power;
}

uint32_t crc_shift(size_t n) { return crc_power(8 * int64_t(n)); }

uint32_t crc_portable(uint32_t crc, const void *data, size_t n) {
    const auto &t = tables().bytes;
    auto at = static_cast<const unsigned char *>(data);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; n >= 8; n -= 8, at += 8) {
        uint32_t low, high;
        memcpy(&low, at, 4);
        memcpy(&high, at + 4, 4);
        low ^= crc;
        crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^
              t[3][high & 255] ^ t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
    }
#endif
    for (; n; n--) crc = (crc >> 8) ^ t[0][(crc ^ *at++) & 255];
    return crc;
}

}  // namespace kvl
