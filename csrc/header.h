// SPDX-License-Identifier: Apache-2.0
// Small payloads whose layout is known: they are put together, and compared, in one call.
#pragma once

#include <cstdint>

#include "kvlink.h"

namespace kvl {

// Write a whole payload of `nbytes`. `piece` is the number of the tensor that is copied. Throws a
// Failure; nothing is written outside the payload.
void pack(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
          const char *quoted_id, uint64_t quoted_id_nbytes, const void *const *sources,
          uint64_t &piece);

// See `kvl_pack_tensors`. False, without a failure, if it is unsupported.
bool pack_tensors(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
                  const char *id, uint64_t id_nbytes, void *const *objects, kvl_describe describe,
                  uint64_t &piece);

// See `kvl_match`.
uint64_t match(const char *text, uint64_t nbytes, const kvl_layout &layout);

// See `kvl_is_packed`.
bool is_packed(const char *payload, uint64_t nbytes, uint64_t header_nbytes,
               const kvl_layout &layout, const char *quoted_id, uint64_t quoted_id_nbytes,
               bool with_digests);

}  // namespace kvl
