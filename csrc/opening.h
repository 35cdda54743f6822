// SPDX-License-Identifier: Apache-2.0
// A small payload of a known layout that has come: checked, and opened, in one call.
#pragma once

#include <cstdint>

#include "kvlink.h"

namespace kvl {

// See `kvl_open`. `number` is that of the tensor that is made.
int open_payload(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
                 const char *id, uint64_t id_nbytes, void *owner, void *list, kvl_make make,
                 uint64_t &number);

}  // namespace kvl
