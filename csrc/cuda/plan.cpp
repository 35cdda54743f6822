// SPDX-License-Identifier: Apache-2.0
#include "plan.h"

#include <algorithm>
#include <cstring>

#include "../cursor.h"
#include "../failure.h"

namespace kvlc {
namespace {

using kvl::View;
using ull = unsigned long long;

// Copy engines leave the whole device to the model: prefer them if they are nearly as fast.
constexpr double kTolerance = 1.05;

uint64_t mean_run(const View &view, uint64_t nbytes) {
    if (!view.dims) return nbytes;
    if (!view.index || view.dims > 1) return std::min<uint64_t>(view.run, nbytes);
    uint64_t pieces = 1;
    for (size_t i = 1; i < view.sizes[0]; i++)
        pieces += view.outermost(i) != view.outermost(i - 1) + view.run;
    return nbytes / pieces;
}

// The widest element whose pieces are complete and aligned on both sides.
uint64_t width_of(const View &view, const char *payload, uint64_t nbytes) {
    uint64_t bits = sizeof(Wide) | nbytes | view.run | reinterpret_cast<uintptr_t>(view.origin) |
                    reinterpret_cast<uintptr_t>(payload);
    for (int d = 0; d < view.dims; d++) bits |= uint64_t(view.strides[d]);
    if (view.index && view.index_split > 1) bits |= uint64_t(view.index_stride);
    return bits & -bits;
}

}  // namespace

void Plan::check_span(const kvl_span &span) {
    if (span.nbytes > nbytes_ || span.start > nbytes_ - span.nbytes)
        kvl::fail(KVL_EBOUNDS, "a span of %llu bytes at %llu in a payload of %llu",
                  ull(span.nbytes), ull(span.start), ull(nbytes_));
    if (span.first_digest != KVL_NO_DIGEST) {
        if (span.first_digest != digests_.count())
            kvl::fail(KVL_EARGUMENT, "a first digest of %llu after %llu digests",
                      ull(span.first_digest), ull(digests_.count()));
        for (uint64_t at = 0; at < span.nbytes; at += KVL_CHUNK)
            (void)digests_.open(std::min<uint64_t>(KVL_CHUNK, span.nbytes - at));
    }
    if (!gather_) return;
    if (span.start < written_)
        kvl::fail(KVL_EOVERLAP, "a span at %llu after one that ends at %llu", ull(span.start),
                  ull(written_));
    written_ = span.start + span.nbytes;
}

void Plan::add(const kvl_copy &copy, uint64_t crossover) {
    check_span(copy.span);
    if (copy.span.nbytes) {
        View view = kvl::check_view(copy.view, copy.span.nbytes, !gather_);
        if (mean_run(view, copy.span.nbytes) < crossover)
            add_task(view, copy.span);
        else
            add_runs(view, copy.span);
    }
    if (open_nbytes_ >= (open_tiles_ ? group_ : kRunGroup)) end_group();
}

void Plan::add_task(const View &view, const kvl_span &span) {
    Task task{};
    task.view = view.origin;
    task.payload = payload_ + span.start;
    task.width = width_of(view, task.payload, span.nbytes);
    bool wide = reinterpret_cast<uintptr_t>(task.payload) % sizeof(Wide) == 0;
    task.unit = wide ? sizeof(Wide) : task.width;
    task.elements = span.nbytes / task.width;
    task.dims = uint64_t(view.dims);
    for (int d = 0; d < view.dims; d++) {
        task.below[d] = view.below[d] / task.width;
        task.strides[d] = view.strides[d];
    }
    const int64_t first_offset = view.index ? offsets_of(view) : -1;
    const uint64_t tile = tile_nbytes(task), tiles = (span.nbytes + tile - 1) / tile;
    for (uint64_t some; task.skipped < tiles; task.skipped += some) {
        if (open_nbytes_ >= group_ || open_packed_ >= group_) end_group();
        const uint64_t room = group_ - std::max(open_nbytes_, open_packed_);
        some = std::clamp<uint64_t>(room / tile, 1, tiles - task.skipped);
        const uint64_t before = task.skipped * tile;
        const uint64_t nbytes = std::min(some * tile, span.nbytes - before);
        task.first_tile = open_tiles_;
        tasks_.push_back(task);
        const size_t first_span = digests_.spans().size();
        add_digests(span, task.payload + before, before, nbytes);
        pieces_.push_back({span.start + before, nbytes, open_packed_, first_offset, first_span,
                           digests_.spans().size()});
        open_tiles_ += some;
        open_nbytes_ += nbytes;
        open_packed_ += (nbytes + sizeof(Wide) - 1) / sizeof(Wide) * sizeof(Wide);
    }
}

int64_t Plan::offsets_of(const View &view) {
    ptrdiff_t stride = view.index_split > 1 ? view.index_stride : 0;
    auto [known, fresh] = known_indices_.try_emplace(
        {view.index, view.sizes[0], view.strides[0], view.index_split, stride},
        int64_t(offsets_.size()));
    if (fresh)
        for (size_t i = 0; i < view.sizes[0]; i++)
            offsets_.push_back(view.outermost(i) - view.origin);
    return known->second;
}

void Plan::add_runs(const View &view, const kvl_span &span) {
    kvl::Cursor cursor;
    cursor.seek(view, 0);
    char *payload = payload_ + span.start;
    // Only runs of one view are joined: CUDA refuses a copy that spans two allocations, and the
    // views of two copies may lie in adjacent ones.
    const size_t first = runs_.size();
    for (uint64_t left = span.nbytes; left;) {
        uint64_t n = std::min<uint64_t>(cursor.left, left);
        bool open = runs_.size() > first;
        if (open && runs_.back().view + runs_.back().nbytes == cursor.at &&
            runs_.back().payload + runs_.back().nbytes == payload)
            runs_.back().nbytes += n;
        else
            runs_.push_back({cursor.at, payload, n});
        payload += n;
        left -= n;
        cursor.advance(n);
    }
    if (on_device_) add_digests(span, payload_ + span.start, 0, span.nbytes);
    for (size_t i = first; i < runs_.size() && !on_device_; i++) {
        const Run &run = runs_[i];
        add_digests(span, run.view, uint64_t(run.payload - payload_) - span.start, run.nbytes);
    }
    open_nbytes_ += span.nbytes;
}

// `nbytes` bytes at `start`, which are the span's from `position` on.
void Plan::add_digests(const kvl_span &span, const char *start, uint64_t position,
                       uint64_t nbytes) {
    if (span.first_digest == KVL_NO_DIGEST) return;
    while (nbytes) {
        const uint64_t chunk = position / KVL_CHUNK;
        const uint64_t stop = std::min((chunk + 1) * KVL_CHUNK, span.nbytes);
        const uint64_t some = std::min(nbytes, stop - position);
        digests_.add(uint32_t(span.first_digest + chunk), start, some, stop - position - some);
        start += some, position += some, nbytes -= some;
    }
}

void Plan::end_group() {
    const size_t span = digests_.spans().size();
    if (open_nbytes_)
        groups_.push_back({open_task_, tasks_.size(), open_run_, runs_.size(), open_span_, span,
                           open_tiles_, open_nbytes_});
    open_nbytes_ = open_packed_ = open_tiles_ = 0;
    open_task_ = tasks_.size();
    open_run_ = runs_.size();
    open_span_ = span;
}

Tables Plan::tables() const {
    Tables found{};
    found.offsets = tasks_.size() * sizeof(Task);
    found.spans = found.offsets + offsets_.size() * sizeof(int64_t);
    found.registers = found.spans + digests_.spans().size() * sizeof(CrcSpan);
    found.done = found.registers + digests_.count() * sizeof(uint32_t);
    found.nbytes = found.done + (digests_.count() ? sizeof(uint32_t) : 0);
    return found;
}

void Plan::stage(char *host, const char *device, const std::vector<char *> &payloads) const {
    const Tables at = tables();
    std::vector<CrcSpan> spans = digests_.spans();
    for (size_t i = 0; i < tasks_.size(); i++) {
        Task task = tasks_[i];
        const Piece &piece = pieces_[i];
        for (size_t span = piece.first_span; span < piece.stop_span; span++)
            spans[span].start = payloads[i] + (spans[span].start - task.payload);
        task.payload = payloads[i];
        if (piece.first_offset >= 0)
            task.offsets =
                reinterpret_cast<const int64_t *>(device + at.offsets) + piece.first_offset;
        memcpy(host + i * sizeof task, &task, sizeof task);
    }
    auto copy = [&](size_t to, const auto &table) {
        if (!table.empty()) memcpy(host + to, table.data(), table.size() * sizeof table[0]);
    };
    copy(at.offsets, offsets_);
    copy(at.spans, spans);
    memset(host + at.registers, 0, at.nbytes - at.registers);
}

char *Plan::packed(size_t task, char *packed) const {
    // Of the view's first byte, as the kernel counts, which may lie before the memory.
    return packed + pieces_[task].packed_at - tasks_[task].skipped * tile_nbytes(tasks_[task]);
}

std::vector<Run> Plan::packed_runs(const Group &group, char *packed) const {
    std::vector<Run> found(runs_.begin() + ptrdiff_t(group.first_run),
                           runs_.begin() + ptrdiff_t(group.stop_run));
    for (size_t i = group.first_task; i < group.stop_task; i++) {
        const Piece &piece = pieces_[i];
        Run run{packed + piece.packed_at, payload_ + piece.start, piece.nbytes};
        // Packed memory is one allocation, and so is a payload.
        if (i > group.first_task && found.back().view + found.back().nbytes == run.view &&
            found.back().payload + found.back().nbytes == run.payload)
            found.back().nbytes += run.nbytes;
        else
            found.push_back(run);
    }
    return found;
}

uint64_t crossover(double kernel, double split, double whole, uint64_t runs, uint64_t nbytes) {
    double each = (split - whole) / double(runs - 1), ahead = kernel * kTolerance - whole;
    if (each <= 0) return 0;            // runs cost nothing beyond their bytes
    if (ahead <= 0) return UINT64_MAX;  // even one run is slower
    double found = each * double(nbytes) / ahead;
    return found < 1e18 ? uint64_t(found) : UINT64_MAX;
}

}  // namespace kvlc
