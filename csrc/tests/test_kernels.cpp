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

// Blocks of rows [block, slot, head], in a random order of blocks and with gaps between rows.
struct Pool {
    uint64_t run, heads, slots, blocks, offset, row, head, slot;
    std::vector<int64_t> index;
    Bytes memory;

    Pool(Random &random, uint64_t nbytes) : run(nbytes) {
        heads = random.number(1, 5), slots = random.number(1, 20);
        blocks = 1 + random.number(0, 70000) / (run * heads * slots);
        offset = random.number(0, 1) ? 64 : random.number(0, 130);
        row = run + (random.number(0, 1) ? 0 : random.number(0, 70));
        bool by_head = random.number(0, 1);
        head = by_head ? row * slots : row, slot = by_head ? row : row * heads;
        for (uint64_t block = 0; block < blocks; block++) index.push_back(int64_t(block));
        std::shuffle(index.begin(), index.end(), random.engine());
        memory = random.bytes(offset + blocks * slots * heads * row);
    }

    kvl_view view(bool by_index) {
        return {memory.data(),
                memory.size(),
                int64_t(offset),
                run,
                {blocks, slots, heads, 1},
                {int64_t(slots * heads * row), int64_t(slot), int64_t(head), 1},
                by_index ? index.data() : nullptr,
                blocks,
                1,
                0};
    }

    // Call with the place of each row in memory, in the payload's order.
    template <class Visit>
    void visit(bool by_index, Visit visit) const {
        for (uint64_t b = 0; b < blocks; b++)
            for (uint64_t s = 0; s < slots; s++)
                for (uint64_t h = 0; h < heads; h++)
                    visit(offset + (by_index ? uint64_t(index[b]) : b) * slots * heads * row +
                          s * slot + h * head);
    }
};

// One row size, out of a pool and back into it.
void rows(Random &random, uint64_t run) {
    Pool pool(random, run);
    const bool by_index = random.number(0, 1);
    Bytes expected, cleared(pool.memory.size(), 0xAA);
    pool.visit(by_index, [&](uint64_t at) {
        auto row = pool.memory.begin() + ptrdiff_t(at);
        expected.insert(expected.end(), row, row + ptrdiff_t(run));
        std::copy(row, row + ptrdiff_t(run), cleared.begin() + ptrdiff_t(at));
    });
    const uint64_t start = random.number(0, 3) ? 256 : random.number(0, 300);
    Bytes payload(start + expected.size() + 9, 0x55);
    const kvl_copy copy{pool.view(by_index), {start, expected.size(), 0}};
    kvl_options options{1, random.number(0, 2), 0};
    kvl_report report{};
    uint32_t digest = 0;
    auto call = [&](auto function) {
        return function(payload.data(), payload.size(), &copy, 1, &digest, 1, &options, &report);
    };
    CHECK(call(kvl_gather) == KVL_OK);
    CHECK(digest == ~kvl::crc_portable(kvl::kCrcStart, expected.data(), expected.size()));
    CHECK(std::equal(expected.begin(), expected.end(), payload.begin() + ptrdiff_t(start)));
    expected.insert(expected.begin(), start, uint8_t(0x55));
    expected.insert(expected.end(), 9, uint8_t(0x55));
    CHECK(payload == expected);
    std::fill(pool.memory.begin(), pool.memory.end(), uint8_t(0xAA));
    CHECK(call(kvl_scatter) == KVL_OK);
    CHECK(pool.memory == cleared);
    payload[start + random.number(0, copy.span.nbytes - 1)] ^= 1;
    CHECK(call(kvl_scatter) == KVL_EDIGEST);
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
    for (uint64_t run = 1; run <= 700; run++) rows(random, run);
    kvl_select("auto");
}
