// SPDX-License-Identifier: Apache-2.0
// The native tests of each kernel by itself: the order of its loads and stores, rows of every size.
#include "tests/test_kernels.cpp"

int main() {
    for (const char *features : {"portable", "avx2", "avx512", "avx512+clmul", "neon"})
        test_kernels(features);
    std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
