// SPDX-License-Identifier: Apache-2.0
// Payloads in the device's own memory, on a fake device: digests, copies, reads and writes, limits.
#include <algorithm>
#include <memory>

#include "../cuda/kvlink_cuda.h"
#include "check.h"
#include "fake_cuda.h"

namespace {

constexpr uint64_t kKernel = UINT64_MAX - 1, kEngines = 0;

#define CHECK_CUDA(condition)                                                                   \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            std::printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, kvlc_last_error()); \
            failures++;                                                                         \
        }                                                                                       \
    } while (0)

// Of exactly this size, so that a sanitizer sees each access beyond it.
std::unique_ptr<uint8_t[]> exactly(const Bytes &bytes) {
    std::unique_ptr<uint8_t[]> made(new uint8_t[bytes.size()]);
    std::copy(bytes.begin(), bytes.end(), made.get());
    return made;
}

void check_digests(const std::vector<kvlc_bytes> &spans) {
    std::vector<uint32_t> crcs(spans.size(), 9);
    CHECK_CUDA(kvlc_digest(0, spans.data(), spans.size(), crcs.data()) == KVL_OK);
    for (size_t i = 0; i < spans.size(); i++)
        CHECK(crcs[i] ==
              simple_crc(static_cast<const uint8_t *>(spans[i].address), spans[i].nbytes));
}

// Lengths about those of words and rounds, at each alignment, and long ones.
void digests() {
    Random random(21);
    std::vector<std::unique_ptr<uint8_t[]>> memory;
    for (uint64_t n = 0; n < 300; n++) {
        std::vector<kvlc_bytes> spans;
        memory.clear();
        for (uint64_t shift = 0; shift < 4; shift++) {
            uint64_t nbytes = n < 40 ? n : random.number(0, n < 280 ? 5000 : 300000);
            memory.push_back(exactly(random.bytes(shift + nbytes)));
            spans.push_back({memory.back().get() + shift, nbytes});
        }
        check_digests(spans);
    }
    Bytes whole = random.bytes(KVL_CHUNK);
    check_digests({{whole.data(), KVL_CHUNK}, {whole.data(), 1024}, {whole.data() + 1, 1023}});
    check_digests({});
    uint32_t before = 0, after = 0;
    kvlc_bytes span{whole.data(), KVL_CHUNK};
    CHECK_CUDA(kvlc_digest(0, &span, 1, &before) == KVL_OK);
    whole[KVL_CHUNK / 2 + 1] ^= 4;
    CHECK_CUDA(kvlc_digest(0, &span, 1, &after) == KVL_OK && after != before);
}

void reads_and_writes() {
    Random random(22);
    Bytes bytes = random.bytes(1 << 20), back(bytes.size());
    void *memory = nullptr;
    uint64_t held = fake_cuda().device_nbytes;
    CHECK_CUDA(kvlc_allocate(0, bytes.size() + 1, &memory) == KVL_OK);
    auto at = static_cast<uint8_t *>(memory) + 1;
    CHECK_CUDA(kvlc_write(0, at, bytes.data(), bytes.size()) == KVL_OK);
    CHECK_CUDA(kvlc_read(0, at, back.data(), back.size()) == KVL_OK && back == bytes);
    CHECK_CUDA(kvlc_write(0, at, nullptr, 0) == KVL_OK && kvlc_read(0, at, nullptr, 0) == KVL_OK);
    CHECK_CUDA(kvlc_free(memory) == KVL_OK && kvlc_free(memory) == KVL_EARGUMENT);
    CHECK(fake_cuda().device_nbytes >= held);  // staging memory is kept
    held = fake_cuda().device_nbytes;
    CHECK(kvlc_allocate(0, 0, &memory) == KVL_EARGUMENT);
    CHECK(kvlc_allocate(7, 1, &memory) == KVL_EARGUMENT);
    fake_cuda().refuses_memory = 1;
    CHECK(kvlc_allocate(0, 64, &memory) == KVLC_ECUDA && std::strstr(kvlc_last_error(), "Malloc"));
    fake_cuda().refuses_memory = 0;
    fake_cuda().wait_fails = true;
    CHECK(kvlc_write(0, back.data(), bytes.data(), 64) == KVLC_ECUDA);
    fake_cuda().wait_fails = false;
    CHECK(fake_cuda().device_nbytes == held && fake_cuda().off_device == 0 && !fake_has_context());
}

// Copies between views and a payload on the device: none of their bytes meets the host.
void copies(uint64_t crossover) {
    Random random(23);
    std::vector<Case> cases;
    std::vector<kvl_copy> copied;
    Bytes expected;
    std::vector<uint32_t> crcs, found_crcs;
    cases.reserve(6);  // views point into them
    for (int n = 0; n < 6; n++) {
        cases.push_back(random_case(random, true));
        const Case &added = cases.back();
        copied.push_back({added.view, {expected.size() + 64, added.nbytes, crcs.size()}});
        expected.resize(expected.size() + 64);
        for (uint64_t i = 0; i < added.nbytes; i++)
            expected.push_back(added.memory[added.address(i)]);
        for (uint32_t crc :
             simple_digests(expected.data() + copied.back().span.start, added.nbytes))
            crcs.push_back(crc);
    }
    void *memory = nullptr;
    Bytes found(expected.size());
    kvlc_options options{0, 0, 0, crossover};
    uint64_t ticket = 0;
    auto payload = [&](auto function) {
        return function(memory, expected.size(), copied.data(), copied.size(), &options, nullptr,
                        &ticket) == KVL_OK &&
               kvlc_digests(ticket, found_crcs.data(), crcs.size()) == KVL_OK &&
               kvlc_finish(ticket) == KVL_OK && found_crcs == crcs;
    };
    found_crcs.resize(crcs.size());
    CHECK_CUDA(kvlc_allocate(0, expected.size(), &memory) == KVL_OK);
    CHECK_CUDA(kvlc_write(0, memory, found.data(), found.size()) == KVL_OK);
    uint64_t launches = fake_cuda().launches, crossed = fake_cuda().crossed_nbytes;
    CHECK_CUDA(payload(kvlc_gather));
    uint64_t tables = fake_cuda().crossed_nbytes - crossed;  // of the kernel
    CHECK(tables < expected.size() && (fake_cuda().launches > launches) == (crossover != kEngines));
    CHECK_CUDA(kvlc_read(0, memory, found.data(), found.size()) == KVL_OK && found == expected);

    std::vector<Bytes> before;
    for (Case &added : cases) {
        before.push_back(added.memory);
        for (uint64_t i = 0; i < added.nbytes; i++) added.memory[added.address(i)] ^= 0xFF;
    }
    crossed = fake_cuda().crossed_nbytes;
    CHECK_CUDA(payload(kvlc_scatter));
    CHECK(fake_cuda().crossed_nbytes - crossed == tables);
    for (size_t i = 0; i < before.size(); i++) CHECK(cases[i].memory == before[i]);

    fake_cuda().devices = 2;
    options.device = 1;
    CHECK(kvlc_gather(memory, expected.size(), copied.data(), copied.size(), &options, nullptr,
                      &ticket) == KVL_EARGUMENT);
    CHECK(std::strstr(kvlc_last_error(), "a payload on device 0, a copy on device 1"));
    fake_cuda().devices = 1;
    options.device = 0;
    CHECK(kvlc_gather(memory, expected.size() + 1, copied.data(), copied.size(), &options, nullptr,
                      &ticket) == KVLC_EPAGEABLE);  // it ends beyond the allocation
    CHECK_CUDA(kvlc_free(memory) == KVL_OK);
}

}  // namespace

void test_device_memory() {
    digests();
    reads_and_writes();
    for (uint64_t crossover : {kEngines, kKernel, KVLC_MEASURED}) copies(crossover);
    fake_cuda().has_batch = false;
    copies(kEngines);
    fake_cuda().has_batch = true;
}
