// SPDX-License-Identifier: Apache-2.0
// What all lanes copy in one call of a kernel: a contiguous piece, or rows of a view.
#pragma once

#include "kernel.h"
#include "view.h"

namespace kvl {

// The order of a view's rows: the payload's; as they lie in the view's memory, if the first and the
// last stay where a CRC begins and ends; as they lie in memory, without gaps for a CRC.
enum class Order { payload, inner, memory };

class Steps {
  public:
    // Rows in one call: their table, and the blocks of four lanes, stay in the processor's caches.
    static constexpr size_t kMost = 128;

    // Plan n contiguous bytes, a multiple of kLine.
    void plan_piece(size_t n);
    // Plan the first `count` rows of a view from an entry on that `Cursor::rows` allows. They lie
    // in the payload one after the other.
    void plan_rows(const View &view, size_t count, bool into_view, Order order);

    const Step *begin() const { return steps_; }
    size_t count() const { return count_; }
    // Whether all distances are multiples of kLine.
    bool are_lines() const { return are_lines_; }
    // Whether each goes equally far in memory, by the low bits of addresses that `near` is about.
    bool are_even() const { return are_even_; }

  private:
    const Gap &gap(ptrdiff_t nbytes);

    Step steps_[kMost];
    size_t count_ = 0;
    bool are_lines_ = true, are_even_ = true;
    const View *view_ = nullptr;  // of the rows that are planned
    // The last gaps: rows of one view have two or three.
    static constexpr int kGaps = 4;
    ptrdiff_t nbytes_[kGaps] = {};
    Gap gaps_[kGaps] = {};
    int next_gap_ = 0;
};

}  // namespace kvl
