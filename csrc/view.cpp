// SPDX-License-Identifier: Apache-2.0
#include "view.h"

#include <algorithm>
#include <vector>

#include "failure.h"

namespace kvl {
namespace {

__extension__ typedef __int128 wide;

// Beyond any address space, and small enough that products of two fit into `wide`.
constexpr uint64_t kHuge = 1ull << 56;

using ull = unsigned long long;

void check_numbers(const kvl_view &v, uint64_t nbytes) {
    if (!v.base) fail(KVL_EARGUMENT, "a view without memory");
    if (v.extent > kHuge) fail(KVL_EARGUMENT, "an extent of %llu bytes", ull(v.extent));
    uint64_t total = v.run;
    if (!v.run || v.run > kHuge) fail(KVL_EARGUMENT, "a run of %llu bytes", ull(v.run));
    uint64_t entry = v.run;
    for (int d = KVL_DIMS - 1; d >= 0; d--) {
        if (!v.sizes[d] || v.sizes[d] > kHuge || wide(total) * v.sizes[d] > wide(kHuge))
            fail(KVL_EARGUMENT, "dimension %d has size %llu", d, ull(v.sizes[d]));
        entry = total;
        total *= v.sizes[d];
        if (v.strides[d] > int64_t(kHuge) || v.strides[d] < -int64_t(kHuge))
            fail(KVL_EARGUMENT, "dimension %d has stride %lld", d, (long long)v.strides[d]);
    }
    bool fits = v.index ? nbytes <= total && total - nbytes < entry : nbytes == total;
    if (!fits)
        fail(KVL_EBOUNDS, "a view of %llu bytes for a span of %llu", ull(total), ull(nbytes));
}

void check_index(const kvl_view &v) {
    if (!v.index_limit || v.index_limit > kHuge || !v.index_split || v.index_split > kHuge ||
        v.index_stride > int64_t(kHuge) || v.index_stride < -int64_t(kHuge))
        fail(KVL_EARGUMENT, "an index with limit %llu, split %llu, stride %lld", ull(v.index_limit),
             ull(v.index_split), (long long)v.index_stride);
    for (uint64_t i = 0; i < v.sizes[0]; i++)
        if (v.index[i] < 0 || uint64_t(v.index[i]) >= v.index_limit)
            fail(KVL_EBOUNDS, "index[%llu] is %lld; it must be below %llu", ull(i),
                 (long long)v.index[i], ull(v.index_limit));
}

// Entries along dimension d that an index can reach, outer and inner part.
uint64_t outer_entries(const kvl_view &v) {
    return v.index ? (v.index_limit - 1) / v.index_split + 1 : v.sizes[0];
}
uint64_t inner_entries(const kvl_view &v) {
    return v.index ? std::min(v.index_limit, v.index_split) : 1;
}

void check_extent(const kvl_view &v, View &view) {
    wide low = v.offset, high = wide(v.offset) + v.run;
    auto reach = [&](uint64_t size, int64_t stride) {
        wide far = wide(size - 1) * stride;
        (far < 0 ? low : high) += far;
    };
    reach(outer_entries(v), v.strides[0]);
    reach(inner_entries(v), v.index_stride);
    for (int d = 1; d < KVL_DIMS; d++) reach(v.sizes[d], v.strides[d]);
    if (low < 0 || high > wide(v.extent))
        fail(KVL_EBOUNDS, "a view of bytes %lld to %lld in memory of %llu", (long long)low,
             (long long)high, ull(v.extent));
    view.low = static_cast<const char *>(v.base) + ptrdiff_t(low);
    view.high = static_cast<const char *>(v.base) + ptrdiff_t(high);
}

// From the smallest stride on: each must be at least the extent of the smaller ones.
void check_distinct(const kvl_view &v) {
    struct Dim {
        uint64_t stride, size;
    };
    std::vector<Dim> dims;
    auto add = [&](uint64_t size, int64_t stride) {
        if (size > 1) dims.push_back({uint64_t(stride < 0 ? -stride : stride), size});
    };
    add(outer_entries(v), v.strides[0]);
    add(inner_entries(v), v.index_stride);
    for (int d = 1; d < KVL_DIMS; d++) add(v.sizes[d], v.strides[d]);
    std::sort(dims.begin(), dims.end(), [](Dim a, Dim b) { return a.stride < b.stride; });
    wide reach = v.run;
    for (const Dim &dim : dims) {
        if (wide(dim.stride) < reach)
            fail(KVL_EOVERLAP, "a target whose stride of %llu bytes overlaps itself",
                 ull(dim.stride));
        reach += wide(dim.size - 1) * dim.stride;
    }
    if (!v.index) return;
    // Within bounds and without overlap, so the limit is at most the extent.
    std::vector<bool> seen(v.index_limit);
    for (uint64_t i = 0; i < v.sizes[0]; i++) {
        if (seen[v.index[i]])
            fail(KVL_EOVERLAP, "index[%llu] is %lld, which came before", ull(i),
                 (long long)v.index[i]);
        seen[v.index[i]] = true;
    }
}

// Merge contiguous dimensions into the run, and neighbouring dimensions into one.
void collapse(const kvl_view &v, View &view) {
    int first = v.index ? 1 : 0, kept = KVL_DIMS;  // kept dimensions lie at [kept, KVL_DIMS)
    size_t sizes[KVL_DIMS];
    ptrdiff_t strides[KVL_DIMS];
    view.run = v.run;
    for (int d = KVL_DIMS - 1; d >= first; d--) {
        if (v.sizes[d] == 1) continue;
        if (kept == KVL_DIMS && v.strides[d] == int64_t(view.run)) {
            view.run *= v.sizes[d];
        } else if (kept < KVL_DIMS && wide(strides[kept]) * sizes[kept] == wide(v.strides[d])) {
            sizes[kept] *= v.sizes[d];
        } else {
            kept--;
            sizes[kept] = v.sizes[d], strides[kept] = v.strides[d];
        }
    }
    if (v.index) {
        kept--;
        sizes[kept] = v.sizes[0], strides[kept] = v.strides[0];
    }
    view.dims = KVL_DIMS - kept;
    size_t below = view.run;
    for (int d = view.dims - 1; d >= 0; d--) {
        view.sizes[d] = sizes[kept + d], view.strides[d] = strides[kept + d];
        view.below[d] = below;
        below *= view.sizes[d];
    }
}

}  // namespace

View check_view(const kvl_view &given, uint64_t nbytes, bool writing) {
    View view{};
    check_numbers(given, nbytes);
    if (given.index) check_index(given);
    check_extent(given, view);
    if (writing) check_distinct(given);
    collapse(given, view);
    view.origin = static_cast<char *>(given.base) + given.offset;
    view.index = given.index;
    view.index_split = given.index_split;
    view.index_stride = given.index_stride;
    return view;
}

}  // namespace kvl
