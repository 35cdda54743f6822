// SPDX-License-Identifier: Apache-2.0
// Errors inside the library; the C interface turns them into a status.
#pragma once

#include <cstdarg>
#include <cstdint>

namespace kvl {

struct Failure {
    int status;
    char text[256];
};

// Throws a Failure with this text.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(int status, const char *format, ...);

}  // namespace kvl
