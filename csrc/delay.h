// SPDX-License-Identifier: Apache-2.0
// A line of each lane that a kernel has loaded and not yet stored.
#pragma once

#include <cstddef>

namespace kvl {

template <class Lines>
class Delay {
  public:
    // Keep these, and return those that came before, if any did.
    inline __attribute__((always_inline)) bool exchange(Lines &lines, ptrdiff_t &to) {
        Lines before = lines_;
        ptrdiff_t before_to = to_;
        lines_ = lines, to_ = to;
        lines = before, to = before_to;
        bool any = holds_;
        holds_ = true;
        return any;
    }

    // Return those that are kept, if any are.
    inline __attribute__((always_inline)) bool take(Lines &lines, ptrdiff_t &to) const {
        lines = lines_, to = to_;
        return holds_;
    }

  private:
    Lines lines_{};
    ptrdiff_t to_ = 0;
    bool holds_ = false;
};

}  // namespace kvl
