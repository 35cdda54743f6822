// SPDX-License-Identifier: Apache-2.0
// Tensors of a payload as objects of the caller's framework.
#pragma once

#include <cstdint>

#include "kvlink.h"

namespace kvl {

// See `kvl_set_interpreter`.
void set_interpreter(const kvl_interpreter &interpreter);

// See `kvl_make_views`. `number` is that of the tensor that is made.
int make_views(char *data, uint64_t nbytes, const kvl_layout &layout, uint64_t first,
               uint64_t count, void *owner, void *list, kvl_make make, uint64_t &number);

}  // namespace kvl
