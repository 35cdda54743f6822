// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "check.h"

void test_copies(const char *features, int rounds);
void test_kernels(const char *features);
void test_refusals();
void test_cuda();
void test_device_memory();

// Arguments: rounds of random copies; the instruction set that must be selected by default.
int main(int argc, char **argv) {
    int rounds = argc > 1 ? std::atoi(argv[1]) : 30;
    for (const char *features : {"portable", "avx2", "avx512", "avx512+clmul", "neon"}) {
        test_kernels(features);
        test_copies(features, rounds);
    }
    if (argc > 2) CHECK(std::string(kvl_features()) == argv[2]);
    test_refusals();
    test_cuda();
    test_device_memory();
    std::printf("%d failed\n", failures);
    return failures ? 1 : 0;
}
