// SPDX-License-Identifier: Apache-2.0
#include "failure.h"

#include <cstdio>

namespace kvl {

void fail(int status, const char *format, ...) {
    Failure failure{status, {}};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(failure.text, sizeof failure.text, format, arguments);
    va_end(arguments);
    throw failure;
}

}  // namespace kvl
