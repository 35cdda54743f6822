// SPDX-License-Identifier: Apache-2.0
// Every instruction set against the definition, byte by byte.
#include <time.h>

#include <algorithm>
#include <thread>

#include "../cursor.h"
#include "check.h"

namespace {

struct PlacedCase {
    Case from;
    kvl_copy copy;
    std::vector<uint32_t> digests;
};

// Some cases one after another in one payload, copied byte by byte.
std::vector<PlacedCase> place_cases(Random &random, Bytes &payload, bool distinct) {
    std::vector<PlacedCase> items;
    uint64_t at = random.number(0, 70), digests = 0;
    for (uint64_t n = random.number(1, 4); n; n--) {
        items.push_back({random_case(random, distinct), {}, {}});
        PlacedCase &item = items.back();
        item.copy.view = item.from.view;
        item.copy.span = {at, item.from.nbytes, digests};
        payload.resize(at + item.from.nbytes);
        for (uint64_t i = 0; i < item.from.nbytes; i++)
            payload[at + i] = item.from.memory[item.from.address(i)];
        item.digests = simple_digests(payload.data() + at, item.from.nbytes);
        digests += item.digests.size();
        at += item.from.nbytes + random.number(0, 300);
    }
    payload.resize(payload.size() + random.number(0, 70));
    return items;
}

void round_trip(uint32_t seed, uint64_t threads, uint64_t stores) {
    Random random(seed);
    Bytes expected_payload;
    std::vector<PlacedCase> items = place_cases(random, expected_payload, true);
    std::vector<kvl_copy> copies;
    std::vector<kvl_span> spans;
    std::vector<uint32_t> digests;
    for (PlacedCase &item : items) {
        copies.push_back(item.copy);
        spans.push_back(item.copy.span);
        digests.insert(digests.end(), item.digests.begin(), item.digests.end());
    }
    kvl_options options{threads, stores, UINT64_MAX};  // a deadline that does not pass
    kvl_report report{};

    Bytes payload(expected_payload.size());
    std::vector<uint32_t> found(digests.size());
    CHECK(kvl_gather(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                     found.size(), &options, &report) == KVL_OK);
    CHECK(payload == expected_payload);
    CHECK(found == digests);
    CHECK(kvl_verify(payload.data(), payload.size(), spans.data(), spans.size(), found.data(),
                     found.size(), &options, &report) == KVL_OK);
    std::vector<uint32_t> recomputed(digests.size());
    CHECK(kvl_digest(payload.data(), payload.size(), spans.data(), spans.size(), recomputed.data(),
                     recomputed.size(), &options, &report) == KVL_OK);
    CHECK(recomputed == digests);

    // Back into cleared memory: exactly the view's bytes are written.
    std::vector<Bytes> cleared;
    for (PlacedCase &item : items) {
        Bytes expected(item.from.memory.size(), 0xAA);
        for (uint64_t i = 0; i < item.from.nbytes; i++)
            expected[item.from.address(i)] = item.from.memory[item.from.address(i)];
        cleared.push_back(expected);
        std::fill(item.from.memory.begin(), item.from.memory.end(), 0xAA);
    }
    CHECK(kvl_scatter(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                      found.size(), &options, &report) == KVL_OK);
    for (size_t i = 0; i < items.size(); i++) CHECK(items[i].from.memory == cleared[i]);

    // A changed bit is reported by copy and chunk.
    size_t changed = random.number(0, items.size() - 1);
    uint64_t byte = random.number(0, items[changed].from.nbytes - 1);
    payload[spans[changed].start + byte] ^= 4;
    CHECK(kvl_verify(payload.data(), payload.size(), spans.data(), spans.size(), found.data(),
                     found.size(), &options, &report) == KVL_EDIGEST);
    CHECK(report.copy == changed && report.chunk == byte / KVL_CHUNK);
    CHECK(kvl_scatter(payload.data(), payload.size(), copies.data(), copies.size(), found.data(),
                      found.size(), &options, &report) == KVL_EDIGEST);
    CHECK(report.copy == changed && report.chunk == byte / KVL_CHUNK);
}

void expanded(uint32_t seed) {
    Random random(seed);
    Bytes expected_payload;
    std::vector<PlacedCase> items = place_cases(random, expected_payload, false);
    std::vector<kvl_copy> copies;
    for (PlacedCase &item : items) {
        item.copy.span.first_digest = KVL_NO_DIGEST;
        copies.push_back(item.copy);
    }
    Bytes payload(expected_payload.size());
    CHECK(kvl_gather(payload.data(), payload.size(), copies.data(), copies.size(), nullptr, 0,
                     nullptr, nullptr) == KVL_OK);
    CHECK(payload == expected_payload);
}

// `behind` tells where `advance` goes, and does not go there.
void positions(uint32_t seed) {
    Random random(seed);
    Case from = random_case(random, false);
    kvl::View view = kvl::check_view(from.view, from.nbytes, false);
    kvl::Cursor cursor;
    cursor.seek(view, 0);
    for (uint64_t done = 0; done < from.nbytes;) {
        size_t n = random.number(1, std::min<size_t>(cursor.left, from.nbytes - done));
        const char *at = cursor.at, *behind = cursor.behind(n);
        CHECK(cursor.at == at);
        cursor.advance(n);
        done += n;
        CHECK(behind == (cursor.at ? cursor.at : at + n));  // null: the view's end
    }
}

void one_dense_tensor(uint32_t seed) {
    Random random(seed);
    Bytes source(random.number(0, 70000)), payload(source.size() + 128, 1);
    for (auto &byte : source) byte = uint8_t(random.number(0, 255));
    uint32_t crc = kvl_crc32c(0, source.data(), source.size());
    auto gather = [&](bool digest) {
        return kvl_gather_dense(payload.data(), payload.size(), 64, source.data(), source.size(),
                                digest);
    };
    CHECK(gather(true) == crc);
    Bytes expected(payload.size(), 1);
    std::copy(source.begin(), source.end(), expected.begin() + 64);
    CHECK(payload == expected);
    CHECK(gather(false) == 0);
    CHECK(payload == expected);
}

std::string digits(uint32_t crc) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", crc);
    return text;
}

void packed_payload(uint32_t seed) {
    Random random(seed);
    Bytes first = random.bytes(random.number(0, 3000)), last = random.bytes(random.number(1, 3000));
    const std::string before = "{00000000,\"", after = ":00000000,00000000}";
    uint64_t start = first.size() + random.number(0, 9),
             space = 8 + before.size() + 6 + after.size();
    uint64_t header = space + random.number(0, 40), total = header + start + last.size();
    kvl_piece pieces[]{span_of(0, first.size(), first.empty() ? KVL_NO_DIGEST : 1),
                       span_of(start, last.size(), 10)};
    kvl_layout layout{
        before.data(), before.size(), 1, after.data(), after.size(), 1, 17, pieces, 2};
    const void *sources[]{first.data(), last.data()};
    Bytes payload(total + 5, 1);
    const char id[] = "\\\"id\\\"";
    CHECK(kvl_pack(payload.data(), total, header, &layout, id, 6, sources) == KVL_OK);
    std::string text = before + id + after;
    text.resize(header - 8, ' ');
    if (!first.empty())
        text.replace(before.size() + 7, 8, digits(simple_crc(first.data(), first.size())));
    text.replace(before.size() + 16, 8, digits(simple_crc(last.data(), last.size())));
    auto bytes = [&] { return reinterpret_cast<const uint8_t *>(text.data()); };
    text.replace(1, 8, digits(simple_crc(bytes(), text.size())));
    Bytes expected(total + 5, 1);
    std::fill(expected.begin(), expected.begin() + total, uint8_t(0));
    expected[0] = uint8_t(header - 8);
    std::copy(text.begin(), text.end(), expected.begin() + 8);
    std::copy(first.begin(), first.end(), expected.begin() + header);
    std::copy(last.begin(), last.end(), expected.begin() + header + start);
    CHECK(payload == expected);
    auto is_packed = [&](uint64_t nbytes, bool with_digests) {
        return kvl_is_packed(payload.data(), nbytes, header, &layout, id, 6, with_digests);
    };
    CHECK(is_packed(total, true));
    for (uint64_t at = 0; at < total; at++) {
        bool is_gap = at >= header + first.size() && at < header + start;
        payload[at] ^= 1;
        CHECK(is_packed(total, true) == is_gap);
        CHECK(is_packed(total, false) == (at >= header));
        payload[at] ^= 1;
    }
    CHECK(!is_packed(total - 1, true));
    for (const char *other : {"\\\"ie\\\"", "\\\"i\\\" ", "id\\\":0"})
        CHECK(!kvl_is_packed(payload.data(), total, header, &layout, other, 6, false));
    CHECK(kvl_match(text.data(), text.size(), &layout) == 2);
    for (size_t at = 0; at < text.size(); at++) {
        std::string other = text;
        other[at] ^= 1;
        CHECK(kvl_match(other.data(), other.size(), &layout) == 0);
        CHECK(kvl_match(text.data(), at, &layout) == 0);
    }
}

// A passed deadline ends each call after some MiB, and nothing is written later; small copies and
// calls without a deadline end as always.
void passed_deadline(uint64_t threads) {
    constexpr uint64_t kNbytes = 64 << 20;
    Bytes source(kNbytes, 3), payload(kNbytes, 1);
    kvl_copy copy{{source.data(), kNbytes, 0, kNbytes, {1, 1, 1, 1}, {}, nullptr, 0, 1, 0},
                  {0, kNbytes, 0}};
    std::vector<uint32_t> digests(kNbytes / KVL_CHUNK, 7);
    kvl_options options{threads, KVL_STORES_AUTO, 1};
    kvl_report report{};
    auto call = [&](auto function, auto *entries) {
        return function(payload.data(), kNbytes, entries, 1, digests.data(), digests.size(),
                        &options, &report);
    };
    uint64_t most = threads * (4 << 20);
    CHECK(call(kvl_gather, &copy) == KVL_EDEADLINE);
    CHECK(std::string(kvl_last_error()) == "the deadline passed before everything was done");
    CHECK(payload[0] == 3 && payload[most] == 1 && payload.back() == 1);
    CHECK(digests[0] != 7 && digests[most / KVL_CHUNK] == 7);
    CHECK(call(kvl_digest, &copy.span) == KVL_EDEADLINE);
    options.deadline = 0;
    CHECK(call(kvl_gather, &copy) == KVL_OK);
    CHECK(payload == source);
    options.deadline = 1;
    CHECK(call(kvl_verify, &copy.span) == KVL_EDEADLINE);
    std::fill(source.begin(), source.end(), uint8_t(5));
    CHECK(call(kvl_scatter, &copy) == KVL_EDEADLINE);
    CHECK(source[0] == 3 && source[most] == 5);
    digests[0] ^= 1;
    CHECK(call(kvl_verify, &copy.span) == KVL_EDIGEST);  // found before
    copy.view.run = copy.view.extent = copy.span.nbytes = 4 << 20;
    CHECK(call(kvl_gather, &copy) == KVL_OK);
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    options.deadline = (uint64_t(now.tv_sec) + 3600) * 1000000000;
    copy.view.run = copy.view.extent = copy.span.nbytes = kNbytes;
    CHECK(call(kvl_gather, &copy) == KVL_OK);
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
        positions(uint32_t(round));
        one_dense_tensor(uint32_t(round));
        packed_payload(uint32_t(round));
    }
    for (uint64_t threads : {1, 3}) passed_deadline(threads);
    std::vector<std::thread> callers;
    for (uint32_t caller = 0; caller < 4; caller++)
        callers.emplace_back([=] { round_trip(1000 + caller, 2, KVL_STORES_STREAM); });
    for (std::thread &caller : callers) caller.join();
    kvl_select("auto");
}
