// SPDX-License-Identifier: Apache-2.0
// A checked view: the caller's strides reduced to the fewest dimensions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvlink.h"

namespace kvl {

struct View {
    char *origin;  // of the first byte; with an index, of entry 0's
    size_t run;    // contiguous bytes below all dimensions
    int dims;      // dimensions left, outermost first
    size_t sizes[KVL_DIMS];
    ptrdiff_t strides[KVL_DIMS];
    size_t below[KVL_DIMS];  // bytes in one entry of the dimension
    const int64_t *index;    // for dimension 0, or null
    uint64_t index_split;
    ptrdiff_t index_stride;
    // The memory that the view may access.
    const char *low, *high;

    // Where entry i of dimension 0 starts.
    char *outermost(size_t i) const {
        if (!index) return origin + static_cast<ptrdiff_t>(i) * strides[0];
        auto value = static_cast<uint64_t>(index[i]);
        if (index_split == 1) return origin + static_cast<ptrdiff_t>(value) * strides[0];
        return origin + static_cast<ptrdiff_t>(value / index_split) * strides[0] +
               static_cast<ptrdiff_t>(value % index_split) * index_stride;
    }
};

// Check a view against its own sizes and its number of bytes; throws Failure.
// `writing`: check, too, that it contains no byte twice.
View check_view(const kvl_view &given, uint64_t nbytes, bool writing);

}  // namespace kvl
