// SPDX-License-Identifier: Apache-2.0
// A position in a view that moves forward over its contiguous pieces.
#pragma once

#include <algorithm>
#include <cstring>

#include "bytes.h"
#include "view.h"

namespace kvl {

class Cursor {
  public:
    char *at = nullptr;  // the piece's next byte
    size_t left = 0;     // bytes left in the piece

    // Set the position to byte `position` of the view.
    void seek(const View &view, size_t position) {
        view_ = &view;
        for (int d = 0; d < view.dims; d++) {
            entry_[d] = position / view.below[d];
            position %= view.below[d];
            start_[d] = d ? start_[d - 1] + ptrdiff_t(entry_[d]) * view.strides[d]
                          : view.outermost(entry_[d]);
        }
        at = (view.dims ? start_[view.dims - 1] : view.origin) + position;
        left = view.run - position + neighbours();
    }

    // Bytes of a piece of the view.
    size_t run() const { return view_->run; }

    // Advance by n bytes within the piece; at its end, to the next piece.
    void advance(size_t n) {
        at += n;
        left -= n;
        if (!left) next();
    }

    // The rows, pieces of the same length, that lie from here on at the view's own distances
    // without its index: `most` or fewer; 0 amid a piece.
    size_t rows(size_t most) const {
        if (left != view_->run) return 0;
        size_t count = 1;
        for (int d = view_->dims - 1; d >= (view_->index ? 1 : 0); d--) {
            size_t entries = view_->sizes[d] - entry_[d];
            if (entry_[d] || count * entries > most)
                return count * std::max<size_t>(1, std::min(entries, most / count));
            count *= entries;
        }
        return count;
    }

    // Advance over so many rows.
    void skip(size_t count) {
        size_t more = count - 1;
        int d = view_->dims - 1;
        for (; more; d--) {
            size_t entry = entry_[d] + more;
            entry_[d] = entry % view_->sizes[d];
            more = entry / view_->sizes[d];
        }
        for (d++; d < view_->dims; d++)
            start_[d] =
                (d ? start_[d - 1] : view_->origin) + ptrdiff_t(entry_[d]) * view_->strides[d];
        next();
    }

    // Where the bytes lie that follow the next n, which are the piece's rest or a part of it.
    const char *behind(size_t n) const {
        if (n < left) return at + n;
        Cursor after = *this;
        after.next();
        return after.at ? after.at : at + n;
    }

    // Copy the next n bytes, over any number of pieces, to or from contiguous memory.
    template <bool kIntoView>
    void move(char *flat, size_t n) {
        while (n) {
            size_t whole = n < view_->run || left < view_->run ? 0 : row(n);
            switch (whole ? view_->run : 0) {  // constant sizes: one instruction for each element
                case 0: break;
                case 1: pieces<kIntoView>(flat, whole, copy_element<1>); break;
                case 2: pieces<kIntoView>(flat, whole, copy_element<2>); break;
                case 4: pieces<kIntoView>(flat, whole, copy_element<4>); break;
                case 8: pieces<kIntoView>(flat, whole, copy_element<8>); break;
                default: pieces<kIntoView>(flat, whole, copy_bytes);
            }
            if (!whole) {
                whole = std::min(n, left);
                if (kIntoView)
                    memcpy(at, flat, whole);
                else
                    memcpy(flat, at, whole);
                advance(whole);
            }
            flat += whole;
            n -= whole;
        }
    }

  private:
    // Bytes of whole pieces that lie one stride apart, from here on and within n.
    size_t row(size_t n) const {
        int d = view_->dims - 1;
        if (d < 0 || (d == 0 && view_->index)) return 0;
        return std::min(n / view_->run, view_->sizes[d] - entry_[d]) * view_->run;
    }

    template <size_t kRun>
    static inline __attribute__((always_inline)) void copy_element(char *to, const char *from,
                                                                   size_t) {
        memcpy(to, from, kRun);
    }

    template <bool kIntoView, class Copy>
    inline __attribute__((always_inline)) void pieces(char *flat, size_t n, Copy copy) {
        int d = view_->dims - 1;
        const ptrdiff_t stride = view_->strides[d];
        const size_t run = view_->run, count = n / run;
        char *piece = at;
        for (size_t i = 0; i < count; i++) {
            if (kIntoView)
                copy(piece + ptrdiff_t(i) * stride, flat + i * run, run);
            else
                copy(flat + i * run, piece + ptrdiff_t(i) * stride, run);
        }
        // Set the position to the last of them; `next` advances from there.
        entry_[d] += count - 1;
        start_[d] += ptrdiff_t(count - 1) * stride;
        left = 0;
        next();
    }

    // With an index of contiguous entries: the bytes of the following entries that are adjacent in
    // memory, such as slots of one block, or blocks of an almost empty pool.
    size_t neighbours() {
        const View &view = *view_;
        if (!view.index || view.dims != 1) return 0;
        size_t entry = entry_[0];
        char *end = start_[0] + view.run;
        while (entry + 1 < view.sizes[0] && view.outermost(entry + 1) == end &&
               end < start_[0] + KVL_CHUNK) {
            entry++;
            end += view.run;
        }
        size_t more = (entry - entry_[0]) * view.run;
        entry_[0] = entry;  // `next` continues after the last of them
        return more;
    }

    void next() {
        const View &view = *view_;
        for (int d = view.dims - 1; d >= 0; d--) {
            if (++entry_[d] == view.sizes[d]) continue;
            start_[d] = d ? start_[d] + view.strides[d] : view.outermost(entry_[d]);
            for (int below = d + 1; below < view.dims; below++) {
                entry_[below] = 0;
                start_[below] = start_[d];
            }
            at = start_[view.dims - 1];
            left = view.run + neighbours();
            return;
        }
        at = nullptr;  // the view's end
    }

    const View *view_ = nullptr;
    size_t entry_[KVL_DIMS] = {};
    char *start_[KVL_DIMS] = {};  // with the entries up to this dimension, and 0 below it
};

}  // namespace kvl
