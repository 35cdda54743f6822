// SPDX-License-Identifier: Apache-2.0
#include "digests.h"

#include <algorithm>

namespace kvlc {

uint32_t Digests::open(uint64_t nbytes) {
    sizes_.push_back(nbytes);
    (void)zeros(nbytes);  // for `finish`
    return static_cast<uint32_t>(sizes_.size() - 1);
}

void Digests::add(uint32_t chunk, const char *start, uint64_t nbytes, uint64_t behind) {
    while (nbytes) {
        uint64_t some = std::min<uint64_t>(nbytes, KVL_CHUNK);
        nbytes -= some;
        spans_.push_back({start, some, pieces_, zeros(behind + nbytes), chunk});
        start += some;
        pieces_ += pieces_of(some);
    }
}

void Digests::finish(const uint32_t *registers, uint32_t *crcs) const {
    for (size_t i = 0; i < sizes_.size(); i++)
        crcs[i] = crc_of_register(registers[i], zeros_.at(sizes_[i]));
}

uint32_t Digests::zeros(uint64_t nbytes) {
    auto [known, fresh] = zeros_.try_emplace(nbytes);
    if (fresh) known->second = crc_zeros(nbytes);
    return known->second;
}

}  // namespace kvlc
