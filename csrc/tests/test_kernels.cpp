// SPDX-License-Identifier: Apache-2.0
// The order of a kernel's loads and stores, seen where sources and targets are the same memory; and
// rows of every size.
#include "../kernel.h"

#include <algorithm>

#include "../crc32c.h"
#include "check.h"

namespace {

using kvl::Kernel;
using kvl::kLanes;
using kvl::kLine;
using kvl::Step;

constexpr size_t kEach = 4096, kLinesEach = 21;
constexpr size_t kNbytes = kLinesEach * kLine;

// Copy to where the lane that is `turn` further reads, `far` bytes behind. If a load came after a
// store of the same address, bytes and CRCs would be others.
void overlap(Random &random, int turn, ptrdiff_t far, bool near, bool stream, bool digest) {
    const Kernel &kernel = kvl::kernel();
    const Bytes before = random.bytes(kEach * (kLanes + 1));
    alignas(64) static char memory[kEach * (kLanes + 1)];
    std::copy(before.begin(), before.end(), memory);
    const char *src[kLanes];
    char *dst[kLanes];
    uint32_t crcs[kLanes], expected[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
        size_t at = 2048 - size_t(far) % kLine + size_t(lane) * kEach;
        src[lane] = memory + at;
        dst[(lane + turn) % kLanes] = memory + at + far;
        crcs[lane] = uint32_t(random.number(0, UINT32_MAX));
        expected[lane] = kvl::crc_portable(crcs[lane], src[lane], kNbytes);
    }
    const auto half = ptrdiff_t(8 * kLine), rest = ptrdiff_t(kNbytes) - half;
    const Step steps[]{{0, 0, half, uint32_t(half), false, false, {}},
                       {half, half, 0, uint32_t(rest), true, false, {}}};
    auto copy = digest ? (stream ? kernel.stream_digest : kernel.copy_digest)
                       : (stream ? kernel.stream : kernel.copy);
    copy(dst, src, steps, 2, crcs, random.number(0, 1) ? src : nullptr, near);
    kernel.fence();
    for (int lane = 0; lane < kLanes; lane++) {
        const uint8_t *source = before.data() + (src[lane] - memory);
        CHECK(std::equal(dst[lane], dst[lane] + kNbytes, reinterpret_cast<const char *>(source)));
        if (digest) CHECK(crcs[lane] == expected[lane]);
    }
}

}  // namespace

void test_kernels(const char *features) {
    if (kvl_select(features) != KVL_OK) return;
    Random random(7);
    const auto near = ptrdiff_t(kvl::kernel().near);
    for (int kind = 0; kvl::kernel().name != std::string("portable") && kind < 4; kind++)
        for (int turn = 0; turn < kLanes; turn++)
            for (ptrdiff_t far = -200; far <= near; far++)
                overlap(random, turn, far, far > 0, kind & 1, kind & 2);
    kvl_select("auto");
}
