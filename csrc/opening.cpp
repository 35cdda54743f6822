// SPDX-License-Identifier: Apache-2.0
#include "opening.h"

#include <cstring>

#include "header.h"
#include "tensor_views.h"

namespace kvl {

int open_payload(char *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout &layout,
                 const char *id, uint64_t id_nbytes, void *owner, void *list, kvl_make make,
                 uint64_t &number) {
    constexpr uint64_t kLength = 8;  // bytes of the field before the text
    constexpr uint64_t kQuoted = 2;  // characters of the quote before the request id
    if (header_nbytes < kLength || header_nbytes > nbytes || !id_nbytes) return KVL_EUNSUPPORTED;
    uint64_t space = header_nbytes - kLength;
    for (uint64_t i = 0; i < kLength; i++)
        if (payload[i] != char(space >> 8 * i)) return KVL_EUNSUPPORTED;
    const char *text = payload + kLength;
    if (match(text, space, layout) != id_nbytes ||
        memcmp(text + layout.before_nbytes + kQuoted, id, id_nbytes))
        return KVL_EUNSUPPORTED;
    return make_views(payload + header_nbytes, nbytes - header_nbytes, layout, 0, layout.count,
                      owner, list, make, number);
}

}  // namespace kvl
