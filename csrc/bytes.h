// SPDX-License-Identifier: Apache-2.0
// Copies of so few bytes that a call of memcpy takes longer.
#pragma once

#include <cstddef>
#include <cstring>

namespace kvl {

// n is at least kStep. The last step begins earlier than where the one before it ends, if n is no
// multiple.
template <size_t kStep>
inline __attribute__((always_inline)) void copy_steps(char *to, const char *from, size_t n) {
    for (size_t at = 0; at + kStep < n; at += kStep) memcpy(to + at, from + at, kStep);
    memcpy(to + n - kStep, from + n - kStep, kStep);
}

inline __attribute__((always_inline)) void copy_bytes(char *to, const char *from, size_t n) {
    if (n >= 32)
        copy_steps<32>(to, from, n);
    else if (n >= 8)
        copy_steps<8>(to, from, n);
    else
        memcpy(to, from, n);
}

}  // namespace kvl
