// SPDX-License-Identifier: Apache-2.0
// The digests of one call: what the kernel reads for them, and what it is told of each byte.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "crc.h"

namespace kvlc {

class Digests {
  public:
    // Begin a digest of so many bytes; returns its number.
    uint32_t open(uint64_t nbytes);
    // `nbytes` bytes of one, with `behind` of its bytes behind them.
    void add(uint32_t chunk, const char *start, uint64_t nbytes, uint64_t behind);

    size_t count() const { return sizes_.size(); }
    const std::vector<CrcSpan> &spans() const { return spans_; }
    // Of all spans before one, or of all.
    uint64_t pieces(size_t span) const {
        return span < spans_.size() ? spans_[span].first_piece : pieces_;
    }
    // The CRC-32C of each, from the kernel's registers.
    void finish(const uint32_t *registers, uint32_t *crcs) const;

  private:
    uint32_t zeros(uint64_t nbytes);

    std::vector<CrcSpan> spans_;
    std::vector<uint64_t> sizes_;
    uint64_t pieces_ = 0;
    std::map<uint64_t, uint32_t> zeros_;  // those computed so far
};

}  // namespace kvlc
