// SPDX-License-Identifier: Apache-2.0
// Checks that print their line, reproducible random numbers, and reference results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../kvlink.h"

inline int failures = 0;

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, kvl_last_error()); \
            failures++;                                                                        \
        }                                                                                      \
    } while (0)

using Bytes = std::vector<uint8_t>;

class Random {
  public:
    explicit Random(uint32_t seed) : engine_(seed) {}
    // From low to high, both included.
    uint64_t number(uint64_t low, uint64_t high) {
        return std::uniform_int_distribution<uint64_t>(low, high)(engine_);
    }
    Bytes bytes(size_t n) {
        Bytes made(n);
        for (auto &byte : made) byte = uint8_t(engine_());
        return made;
    }
    std::mt19937 &engine() { return engine_; }

  private:
    std::mt19937 engine_;
};

// A piece of which only the bytes count, not dtype and sizes.
inline kvl_piece span_of(uint64_t start, uint64_t nbytes, uint64_t digest) {
    return {start, nbytes, digest, 0, 0, nullptr};
}

// By the definition, one bit at a time.
inline uint32_t simple_crc(const uint8_t *data, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78 : 0);
    }
    return ~crc;
}

inline std::vector<uint32_t> simple_digests(const uint8_t *data, size_t n) {
    std::vector<uint32_t> found;
    for (size_t at = 0; at < n; at += KVL_CHUNK)
        found.push_back(simple_crc(data + at, n - at < KVL_CHUNK ? n - at : KVL_CHUNK));
    return found;
}

// A strided view, indexed or not, and the address of each of its bytes by the simplest method.
struct Case {
    kvl_view view{};
    uint64_t nbytes = 0;
    Bytes memory;
    std::vector<int64_t> index;

    uint64_t address(uint64_t byte) const {
        int64_t at = view.offset + int64_t(byte % view.run);
        uint64_t rest = byte / view.run;
        for (int d = KVL_DIMS - 1; d >= 0; d--) {
            int64_t entry = int64_t(rest % view.sizes[d]);
            rest /= view.sizes[d];
            if (d || !view.index) {
                at += entry * view.strides[d];
            } else {
                int64_t value = view.index[entry], split = int64_t(view.index_split);
                at += value / split * view.strides[0] + value % split * view.index_stride;
            }
        }
        return uint64_t(at);
    }
};

Case random_case(Random &random, bool distinct);
