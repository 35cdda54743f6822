// SPDX-License-Identifier: Apache-2.0
#include "steps.h"

#include <algorithm>

#include "crc32c.h"

namespace kvl {
namespace {

// How far to prefetch ahead in n bytes: enough to hide the memory's latency, but no byte behind
// what follows them.
size_t distance(size_t n) { return n < 1024 ? n : n < 4096 ? 1024 : 2048; }

// How far a row lies from the first one of a view.
ptrdiff_t offset_of(const View &view, size_t row) {
    ptrdiff_t offset = 0;
    for (int d = view.dims - 1; row; row /= view.sizes[d--])
        offset += ptrdiff_t(row % view.sizes[d]) * view.strides[d];
    return offset;
}

}  // namespace

void Steps::plan_piece(size_t n) {
    size_t far = distance(n), near = n - far;
    count_ = 0;
    if (near) steps_[count_++] = {0, 0, ptrdiff_t(far), uint32_t(near), false, false, {}};
    auto rest = ptrdiff_t(near);
    steps_[count_++] = {rest, rest, 0, uint32_t(far), true, false, {}};
    are_lines_ = are_even_ = true;
    view_ = nullptr;
}

void Steps::plan_rows(const View &view, size_t count, bool into_view, Order kind) {
    if (view_ == &view && count_ == count) return;
    view_ = &view, count_ = count;
    ptrdiff_t offsets[kMost], bits = 0;
    size_t order[kMost] = {};
    for (size_t row = 0; row < count; row++) {
        order[row] = row;
        bits |= offsets[row] = offset_of(view, row);
    }
    are_lines_ = bits % ptrdiff_t(kLine) == 0;
    // The processor prefetches what is read in memory's order.
    auto lies_before = [&](size_t a, size_t b) {
        return offsets[a] != offsets[b] ? offsets[a] < offsets[b] : a < b;
    };
    if (kind != Order::payload) std::sort(order, order + count, lies_before);
    if (kind == Order::inner && (order[0] != 0 || order[count - 1] != count - 1))
        for (size_t row = 0; row < count; row++) order[row] = row;
    size_t far = std::min(count, std::max<size_t>(1, distance(count * view.run) / view.run));
    for (size_t i = 0; i < count; i++) {
        ptrdiff_t flat = ptrdiff_t(order[i] * view.run), at = offsets[order[i]];
        bool behind = i + far >= count;
        ptrdiff_t ahead = offsets[order[behind ? i + far - count : i + far]];
        ptrdiff_t nbytes =
            i && kind == Order::inner ? flat - steps_[i - 1].to - ptrdiff_t(view.run) : 0;
        if (into_view)
            steps_[i] = {flat, at, 0, uint32_t(view.run), false, false, {}};
        else
            steps_[i] = {at,
                         flat,
                         ahead,
                         uint32_t(view.run),
                         behind,
                         nbytes != 0,
                         nbytes ? gap(nbytes) : Gap{}};
    }
    ptrdiff_t first = steps_[0].to - steps_[0].from;
    are_even_ = std::all_of(steps_, steps_ + count, [&](const Step &step) {
        return (step.to - step.from - first) % 4096 == 0;
    });
}

const Gap &Steps::gap(ptrdiff_t nbytes) {
    for (int i = 0; i < kGaps; i++)
        if (nbytes_[i] == nbytes) return gaps_[i];
    int i = next_gap_++ % kGaps;
    int64_t bits = 8 * int64_t(nbytes), line = 8 * int64_t(kLine);
    nbytes_[i] = nbytes;
    // A carry-less product of reflected numbers is by x^33 too large; the first is of the half of
    // 16 bytes that lies 64 bits before the other.
    return gaps_[i] = {{crc_power(bits + line + 31), crc_power(bits + line - 33)},
                       crc_power(bits - 33)};
}

}  // namespace kvl
