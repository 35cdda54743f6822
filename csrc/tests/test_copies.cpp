// Every instruction set against the definition, byte by byte.
#include <thread>

#include "check.h"

namespace {

struct Placed {
    Case from;
    kvl_copy copy;
    std::vector<uint32_t> digests;
};

// Some cases one after another in one payload, as the slowest way would fill it.
std::vector<Placed> place(Chance &chance, Bytes &payload, bool distinct) {
    std::vector<Placed> placed;
    uint64_t at = chance.number(0, 70), digests = 0;
    for (uint64_t n = chance.number(1, 4); n; n--) {
        placed.push_back({random_case(chance, distinct), {}, {}});
        Placed &now = placed.back();
        now.copy.view = now.from.view;
        now.copy.span = {at, now.from.nbytes, digests};
        payload.resize(at + now.from.nbytes);
        for (uint64_t i = 0; i < now.from.nbytes; i++)
            payload[at + i] = now.from.memory[now.from.address(i)];
        now.digests = slow_digests(payload.data() + at, now.from.nbytes);
        digests += now.digests.size();
        at += now.from.nbytes + chance.number(0, 300);
    }
    payload.resize(payload.size() + chance.number(0, 70));
    return placed;
}

void round_trip(uint32_t seed, uint64_t threads, uint64_t stores) {
    Chance chance(seed);
    Bytes wanted;
    std::vector<Placed> placed = place(chance, wanted, true);
    std::vector<kvl_copy> copies;
    std::vector<kvl_span> spans;
    std::vector<uint32_t> digests;
    for (Placed &now : placed) {
        copies.push_back(now.copy);
        spans.push_back(now.copy.span);
        digests.insert(digests.end(), now.digests.begin(), now.digests.end());
    }
    kvl_options options{threads, stores};
    kvl_report report{};

    Bytes payload(wanted.size());
    std::vector<uint32_t> found(digests.size());
    CHECK(kvl_gather(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                     found.size(), &options, &report) == KVL_OK);
    CHECK(payload == wanted);
    CHECK(found == digests);
    CHECK(kvl_verify(payload.data(), payload.size(), spans.data(), spans.size(), found.data(),
                     found.size(), &options, &report) == KVL_OK);
    std::vector<uint32_t> again(digests.size());
    CHECK(kvl_digest(payload.data(), payload.size(), spans.data(), spans.size(), again.data(),
                     again.size(), &options, &report) == KVL_OK);
    CHECK(again == digests);

    // Back into memory that was cleared: exactly the view's bytes come back.
    std::vector<Bytes> cleared;
    for (Placed &now : placed) {
        Bytes expected(now.from.memory.size(), 0xAA);
        for (uint64_t i = 0; i < now.from.nbytes; i++)
            expected[now.from.address(i)] = now.from.memory[now.from.address(i)];
        cleared.push_back(expected);
        std::fill(now.from.memory.begin(), now.from.memory.end(), 0xAA);
    }
    CHECK(kvl_scatter(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                      found.size(), &options, &report) == KVL_OK);
    for (size_t i = 0; i < placed.size(); i++) CHECK(placed[i].from.memory == cleared[i]);

    // One bit changed: named by copy and chunk.
    size_t victim = chance.number(0, placed.size() - 1);
    uint64_t byte = chance.number(0, placed[victim].from.nbytes - 1);
    payload[spans[victim].start + byte] ^= 4;
    CHECK(kvl_verify(payload.data(), payload.size(), spans.data(), spans.size(), found.data(),
                     found.size(), &options, &report) == KVL_EDIGEST);
    CHECK(report.copy == victim && report.chunk == byte / KVL_CHUNK);
    CHECK(kvl_scatter(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                      found.size(), &options, &report) == KVL_EDIGEST);
    CHECK(report.copy == victim && report.chunk == byte / KVL_CHUNK);
}

void expanded(uint32_t seed) {
    Chance chance(seed);
    Bytes wanted;
    std::vector<Placed> placed = place(chance, wanted, false);
    std::vector<kvl_copy> copies;
    for (Placed &now : placed) {
        now.copy.span.first_digest = KVL_NO_DIGEST;
        copies.push_back(now.copy);
    }
    Bytes payload(wanted.size());
    CHECK(kvl_gather(payload.data(), payload.size(), copies.data(), copies.size(), nullptr, 0,
                     nullptr, nullptr) == KVL_OK);
    CHECK(payload == wanted);
}

void known_answer() {
    const uint8_t text[] = "123456789";
    kvl_span span{0, 9, 0};
    uint32_t digest = 0;
    CHECK(kvl_digest(text, 9, &span, 1, &digest, 1, nullptr, nullptr) == KVL_OK);
    CHECK(digest == 0xE3069283);
}

}  // namespace

void test_copies(const char *features, int rounds) {
    if (kvl_select(features) != KVL_OK) {
        std::printf("%s: not on this processor\n", features);
        return;
    }
    CHECK(std::string(kvl_features()) == features);
    known_answer();
    for (int round = 0; round < rounds; round++) {
        round_trip(uint32_t(round), 1 + uint64_t(round) % 3, uint64_t(round / 3) % 3);
        expanded(uint32_t(round));
    }
    std::vector<std::thread> callers;
    for (uint32_t caller = 0; caller < 4; caller++)
        callers.emplace_back([=] { round_trip(1000 + caller, 2, KVL_STORES_STREAM); });
    for (std::thread &caller : callers) caller.join();
    kvl_select("auto");
}
