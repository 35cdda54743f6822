// SPDX-License-Identifier: Apache-2.0
// The CUDA part on a fake device: addresses, both copy methods, order, progress, refusals.
#include <algorithm>
#include <thread>

#include "../cuda/device.h"
#include "../cuda/plan.h"
#include "check.h"
#include "fake_cuda.h"

namespace {

constexpr uint64_t kKernel = UINT64_MAX - 1, kEngines = 0;
constexpr uint64_t kStream = 64, kOtherStream = 65;

#define CHECK_CUDA(condition)                                                                   \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            std::printf("%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, kvlc_last_error()); \
            failures++;                                                                         \
        }                                                                                       \
    } while (0)

// Cases and their payload in registered memory; every other one has digests.
struct Fixture {
    std::vector<Case> cases;
    std::vector<kvl_copy> copies;
    std::vector<uint32_t> digests;
    Bytes expected, payload;
    kvlc_options options{0, 0, 0, kEngines};
    uint64_t ticket = 0;

    void add(Case made, uint64_t start) {
        cases.push_back(std::move(made));
        const Case &added = cases.back();
        const bool is_digested = cases.size() % 2;
        copies.push_back(
            {added.view, {start, added.nbytes, is_digested ? digests.size() : KVL_NO_DIGEST}});
        expected.resize(start + added.nbytes);
        for (uint64_t i = 0; i < added.nbytes; i++)
            expected[start + i] = added.memory[added.address(i)];
        if (!is_digested) return;
        for (uint32_t crc : simple_digests(&expected[start], added.nbytes)) digests.push_back(crc);
    }
    uint64_t end() const { return expected.size(); }
    void pin() {
        payload.assign(expected.size(), 0xEE);
        CHECK_CUDA(kvlc_register(0, payload.data(), payload.size(), 0) == KVL_OK);
    }
    int gather(kvl_report *report = nullptr) {
        return kvlc_gather(payload.data(), payload.size(), copies.data(), copies.size(), &options,
                           report, &ticket);
    }
    int scatter() {
        return kvlc_scatter(payload.data(), payload.size(), copies.data(), copies.size(), &options,
                            nullptr, &ticket);
    }
    std::vector<uint32_t> found_digests() {
        std::vector<uint32_t> found(digests.size(), 9);
        CHECK_CUDA(kvlc_digests(ticket, found.data(), found.size()) == KVL_OK);
        return found;
    }
    bool copied(size_t copy) const {
        const kvl_span &span = copies[copy].span;
        return std::equal(&payload[span.start], &payload[span.start] + span.nbytes,
                          &expected[span.start]);
    }
    ~Fixture() {
        if (!payload.empty()) kvlc_unregister(payload.data());
    }
};

Case flat_case(Random &random, uint64_t nbytes) {
    Case made;
    made.memory = random.bytes(nbytes);
    made.nbytes = nbytes;
    made.view = {made.memory.data(), nbytes,  0, nbytes, {1, 1, 1, 1},
                 {0, 0, 0, 0},       nullptr, 0, 1,      0};
    return made;
}

// Rows of `run` bytes, looked up in an index.
Case paged_case(Random &random, uint64_t run, std::vector<int64_t> index, uint64_t limit) {
    Case made = flat_case(random, run * limit);
    made.index = std::move(index);
    made.nbytes = run * made.index.size();
    made.view.run = run;
    made.view.sizes[0] = made.index.size();
    made.view.strides[0] = int64_t(run);
    made.view.index = made.index.data(), made.view.index_limit = limit;
    return made;
}

void round_trip(uint32_t seed, uint64_t crossover, bool aligned) {
    Random random(seed);
    Fixture fixture;
    uint64_t at = aligned ? 256 : random.number(0, 70);
    fixture.cases.reserve(8);  // views point into them
    for (uint64_t n = random.number(1, 5); n; n--) {
        fixture.add(random_case(random, true), at);
        at = fixture.end() + random.number(0, 300);
        if (aligned) at = (at + 255) / 256 * 256;
    }
    fixture.pin();
    fixture.options.crossover = crossover;
    Bytes empty = fixture.payload;
    CHECK_CUDA(fixture.gather() == KVL_OK);
    CHECK(fixture.payload == empty);  // asynchronous
    CHECK(fixture.found_digests() == fixture.digests);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    for (size_t copy = 0; copy < fixture.copies.size(); copy++) CHECK(fixture.copied(copy));
    uint64_t last = 0;
    for (const kvl_copy &copy : fixture.copies) {  // and nothing between
        for (; last < copy.span.start; last++) CHECK(fixture.payload[last] == 0xEE);
        last += copy.span.nbytes;
    }

    std::vector<Bytes> before;
    for (Case &added : fixture.cases) {
        before.push_back(added.memory);
        for (uint64_t i = 0; i < added.nbytes; i++) added.memory[added.address(i)] ^= 0xFF;
    }
    CHECK_CUDA(fixture.scatter() == KVL_OK);
    fake_run(nullptr);  // the caller's stream waits for the copies
    for (size_t i = 0; i < before.size(); i++) CHECK(fixture.cases[i].memory == before[i]);
    CHECK(fixture.found_digests() == fixture.digests);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
}

void copies_of_both_kinds() {
    FakeCuda &fake = fake_cuda();
    uint64_t launches = fake.launches, batched = fake.batched;
    for (uint32_t seed = 0; seed < 40; seed++)
        for (uint64_t crossover : {kEngines, uint64_t(300), kKernel})
            round_trip(seed, crossover, seed % 2);
    CHECK(fake.launches > launches && fake.batched > batched);
    fake.has_batch = false;  // a driver that is too old for it
    uint64_t copied = fake.copied;
    round_trip(7, kEngines, false);
    round_trip(8, kEngines, false);
    CHECK(fake.copied > copied + 4);
    fake.has_batch = true;
}

// Longer than a group, and more groups than buffers; with tensors that need none between them.
void long_views(uint64_t stream, int64_t rows) {
    Random random(13);
    Fixture fixture;
    fixture.cases.reserve(4);
    std::vector<int64_t> blocks;
    for (int64_t i = 0; i < rows; i++) blocks.push_back(i * 7 % (rows + 3));
    fixture.add(paged_case(random, 4096, blocks, rows + 3), 64);
    fixture.add(flat_case(random, 70), fixture.end() + 3);
    blocks.resize(size_t(rows) / 10);  // by single bytes
    fixture.add(paged_case(random, 4095, blocks, rows + 3), fixture.end() + 1);
    fixture.add(paged_case(random, 16, {2, 0}, 4), fixture.end() + 5);
    fixture.pin();
    fixture.options.crossover = kKernel;
    fixture.options.stream = stream;
    CHECK_CUDA(fixture.gather() == KVL_OK);
    CHECK(fixture.found_digests() == fixture.digests);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    for (size_t copy = 0; copy < 4; copy++) CHECK(fixture.copied(copy));
    std::vector<Bytes> before;
    for (Case &added : fixture.cases) {
        before.push_back(added.memory);
        for (uint64_t i = 0; i < added.nbytes; i++) added.memory[added.address(i)] ^= 0xFF;
    }
    CHECK_CUDA(fixture.scatter() == KVL_OK);
    CHECK(fixture.found_digests() == fixture.digests);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    for (size_t i = 0; i < before.size(); i++) CHECK(fixture.cases[i].memory == before[i]);
}

// Two callers that follow one stream at once, and two that follow another one.
void many_threads() {
    std::vector<std::thread> threads;
    for (uint64_t stream : {200, 200, 201, 201})
        threads.emplace_back([stream] { long_views(stream, 300); });
    for (std::thread &thread : threads) thread.join();
}

void no_memory_to_pack_in() {
    FakeCuda &fake = fake_cuda();
    kvlc::Device &device = kvlc::Device::get(0);
    std::vector<kvlc::PackBuffer> taken;
    fake.refuses_memory = true;
    for (kvlc::PackBuffer buffer; (buffer = device.acquire_buffer()).memory;)
        taken.push_back(buffer);
    CHECK(taken.size() >= 4);  // all were given back
    uint64_t by_engines = fake.copied + fake.batched, launches = fake.launches;
    long_views(0, 3600);
    CHECK(fake.copied + fake.batched - by_engines == 2);  // the tables of both directions
    CHECK(fake.launches > launches + 1);
    fake.refuses_memory = false;
    for (kvlc::PackBuffer buffer : taken) device.release_buffer(buffer);
}

// The memory of one stream's buffers is the next one's, and so are the streams that copy.
void many_streams() {
    uint64_t nbytes = fake_cuda().device_nbytes;
    int streams = fake_cuda().streams;
    for (uint64_t stream = 100; stream < 110; stream++) long_views(stream, 300);
    CHECK(fake_cuda().device_nbytes == nbytes && fake_cuda().streams == streams);
}

void another_device() {
    Random random(8);
    fake_cuda().devices = 2;
    for (uint64_t crossover : {kEngines, kKernel, KVLC_MEASURED}) {
        Fixture fixture;
        fixture.add(flat_case(random, 5000), 0);
        fixture.pin();
        fixture.options = {1, 0, 0, crossover};
        CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_wait(fixture.ticket) == KVL_OK);
        CHECK(fixture.found_digests() == fixture.digests);
        CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK && fixture.copied(0));
        CHECK_CUDA(fixture.scatter() == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK);
    }
    CHECK(!fake_has_context());  // the thread had none before
    fake_cuda().devices = 1;
}

void the_callers_stream() {
    Random random(1);
    Fixture fixture;
    fixture.add(flat_case(random, 5000), 64);
    fixture.pin();
    Bytes &memory = fixture.cases[0].memory;
    fake_enqueue(nullptr, [&] { std::fill(memory.begin(), memory.end(), 9); });
    CHECK_CUDA(fixture.gather() == KVL_OK);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    CHECK(fixture.payload[64] == 9 && fixture.payload[5063] == 9);

    fake_cuda().capturing = true;
    CHECK(fixture.gather() == KVL_EARGUMENT && std::strstr(kvlc_last_error(), "captured"));
    fake_cuda().capturing = false;

    bool other_ran = false;  // a stream that waits blocks no other stream
    auto other = reinterpret_cast<cudaStream_t>(uintptr_t(64));
    fake_enqueue(other, [&] { other_ran = true; });
    Fixture slow;
    slow.add(flat_case(random, 64), 0);
    slow.pin();
    slow.options.stream = 64;
    CHECK_CUDA(slow.gather() == KVL_OK);
    CHECK_CUDA(fixture.gather() == KVL_OK);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    CHECK(!other_ran);
    CHECK_CUDA(kvlc_finish(slow.ticket) == KVL_OK);
    CHECK(other_ran && slow.copied(0));
}

void after_what_was_recorded() {
    Random random(9);
    Fixture fixture;
    fixture.add(flat_case(random, 5000), 64);
    fixture.pin();
    Bytes &memory = fixture.cases[0].memory;
    auto write = [&](uint8_t value) {
        fake_enqueue(reinterpret_cast<cudaStream_t>(kStream),
                     [&memory, value] { std::fill(memory.begin(), memory.end(), value); });
    };
    uint64_t recorded = 0, complete = 9;
    write(1);
    CHECK_CUDA(kvlc_record(0, kStream, &recorded) == KVL_OK);
    write(2);
    CHECK_CUDA(kvlc_poll(recorded, &complete) == KVL_OK && complete == 0);
    fixture.options.after = recorded;  // and not after the stream of the options
    CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK);
    CHECK(fixture.payload[64] == 1 && fixture.payload[5063] == 1 && memory[0] == 1);
    CHECK_CUDA(kvlc_poll(recorded, &complete) == KVL_OK && complete == 1);

    CHECK_CUDA(fixture.scatter() == KVL_OK);
    fake_run(reinterpret_cast<cudaStream_t>(kStream));
    CHECK(memory[0] == 2);  // no stream waits for these copies by itself
    CHECK_CUDA(kvlc_stream_wait(fixture.ticket, kOtherStream) == KVL_OK);
    fake_run(reinterpret_cast<cudaStream_t>(kOtherStream));
    CHECK(memory[0] == 1 && memory[4999] == 1);
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);

    write(3);
    uint64_t unreached = 0;
    CHECK_CUDA(kvlc_record(0, kStream, &unreached) == KVL_OK);
    CHECK_CUDA(kvlc_finish(unreached) == KVL_OK);
    CHECK(memory[0] == 1);  // did not wait for it
    CHECK_CUDA(kvlc_record(0, kStream, &unreached) == KVL_OK);
    CHECK_CUDA(kvlc_wait(unreached) == KVL_OK && memory[0] == 3);
    CHECK(kvlc_digests(unreached, nullptr, 0) == KVL_OK);
    CHECK(kvlc_digests(unreached, nullptr, 1) == KVL_EARGUMENT);
    CHECK_CUDA(kvlc_finish(unreached) == KVL_OK && kvlc_finish(recorded) == KVL_OK);
}

void wrong_predecessors() {
    Random random(10);
    Fixture fixture;
    fixture.add(flat_case(random, 64), 0);
    fixture.pin();
    auto refused = [&](const char *text) {
        return fixture.gather() == KVL_EARGUMENT && std::strstr(kvlc_last_error(), text);
    };
    CHECK_CUDA(fixture.gather() == KVL_OK);
    uint64_t transfer = fixture.ticket, recorded = 0;
    fixture.options.after = transfer;
    CHECK(refused("is not of kvlc_record on device 0"));
    fake_cuda().devices = 2;
    CHECK_CUDA(kvlc_record(1, 0, &recorded) == KVL_OK);
    fixture.options.after = recorded;
    CHECK(refused("is not of kvlc_record on device 0"));
    CHECK_CUDA(kvlc_finish(recorded) == KVL_OK && kvlc_finish(transfer) == KVL_OK);
    fake_cuda().devices = 1;
    CHECK(refused("no ticket"));
    fake_cuda().capturing = true;
    CHECK(kvlc_record(0, 0, &recorded) == KVL_EARGUMENT);
    CHECK(std::strstr(kvlc_last_error(), "captured"));
    fake_cuda().capturing = false;
}

// CUDA forbids most calls to all threads while one of them captures a graph.
void while_another_thread_captures() {
    fake_cuda().capturing_elsewhere = true;
    for (uint64_t crossover : {kEngines, kKernel}) round_trip(11, crossover, true);
    Random random(11);
    Fixture fixture;
    fixture.add(flat_case(random, 64), 0);
    fixture.pin();
    uint64_t complete = 0;
    CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_poll(fixture.ticket, &complete) == KVL_OK);
    CHECK_CUDA(kvlc_wait(fixture.ticket) == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK);
    CHECK(fixture.copied(0) && !fake_is_relaxed());
    fake_cuda().capturing_elsewhere = false;
}

void no_call_off_the_device() {
    Random random(12);
    Fixture fixture;
    fixture.add(flat_case(random, 64), 0);
    fixture.pin();
    CHECK_CUDA(fixture.gather() == KVL_OK);
    fake_cuda().wait_fails = true;
    CHECK(kvlc_finish(fixture.ticket) == KVLC_ECUDA);  // and deletes the ticket
    fake_cuda().wait_fails = false;
    CHECK(fake_cuda().off_device == 0 && !fake_has_context());
    CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK);
}

void progress() {
    Random random(2);
    Fixture fixture;
    fixture.cases.reserve(2);
    for (uint64_t nbytes : {3 << 20, 5 << 20})
        fixture.add(flat_case(random, nbytes), fixture.end());
    fixture.pin();
    uint64_t complete = 9;
    CHECK_CUDA(fixture.gather() == KVL_OK);
    CHECK_CUDA(kvlc_poll(fixture.ticket, &complete) == KVL_OK && complete == 0);
    CHECK(!fixture.copied(0));
    CHECK_CUDA(kvlc_wait(fixture.ticket) == KVL_OK);
    CHECK(fixture.copied(0) && fixture.copied(1));
    CHECK_CUDA(kvlc_poll(fixture.ticket, &complete) == KVL_OK && complete == 1);
    uint32_t few[2];
    CHECK(kvlc_digests(fixture.ticket, few, 2) == KVL_EARGUMENT);
    CHECK(std::strstr(kvlc_last_error(), "2 digests of a ticket that has 3"));
    CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    CHECK(kvlc_finish(fixture.ticket) == KVL_EARGUMENT &&
          kvlc_wait(fixture.ticket) == KVL_EARGUMENT &&
          kvlc_digests(fixture.ticket, few, 2) == KVL_EARGUMENT);
}

// Bytes that change between the view and the digest are another digest than the committed one.
void digests_of_what_arrived() {
    for (uint64_t crossover : {kEngines, kKernel}) {
        Random random(14);
        Fixture fixture;
        fixture.add(paged_case(random, 4096, {3, 0, 2}, 4), 64);
        fixture.pin();
        fixture.options.crossover = crossover;
        CHECK_CUDA(fixture.gather() == KVL_OK && fixture.found_digests() == fixture.digests);
        CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
        fixture.payload[64 + 5000] ^= 1;
        CHECK_CUDA(fixture.scatter() == KVL_OK && fixture.found_digests() != fixture.digests);
        CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    }
}

// Digests follow the caller's stream, as copies do, and later work of it follows them.
void digests_in_order() {
    for (uint64_t crossover : {kEngines, kKernel}) {
        Random random(15);
        Fixture fixture;
        fixture.add(flat_case(random, 5000), 64);
        fixture.pin();
        fixture.options.crossover = crossover, fixture.options.stream = kStream;
        Bytes &memory = fixture.cases[0].memory;
        auto stream = reinterpret_cast<cudaStream_t>(kStream);
        auto write = [&](uint8_t value) {
            fake_enqueue(stream,
                         [&memory, value] { std::fill(memory.begin(), memory.end(), value); });
        };
        write(1);
        CHECK_CUDA(fixture.gather() == KVL_OK);
        CHECK_CUDA(kvlc_stream_wait(fixture.ticket, kStream) == KVL_OK);
        write(2);
        fake_run(stream);
        Bytes ones(5000, 1);
        CHECK(memory[0] == 2 && fixture.found_digests() == simple_digests(ones.data(), 5000));
        CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);

        CHECK_CUDA(fixture.scatter() == KVL_OK);
        write(3);
        fake_run(stream);
        CHECK(memory[0] == 3 && fixture.found_digests() == simple_digests(ones.data(), 5000));
        CHECK_CUDA(kvlc_finish(fixture.ticket) == KVL_OK);
    }
}

void a_failure_midway() {
    Random random(3);
    Fixture fixture;
    fixture.cases.reserve(3);
    for (int i = 0; i < 3; i++) fixture.add(flat_case(random, 5000), fixture.end() + 64);
    fixture.pin();
    fake_cuda().fails_after = 1;  // within a group, which the fake copies in reverse
    CHECK(fixture.gather() == KVLC_ECUDA);
    fake_cuda().fails_after = -1;
    CHECK(fixture.copied(2) && !fixture.copied(1));  // no copy is in progress any more
    CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK &&
               fixture.copied(1));

    Fixture unmarked;  // copies that no event could be recorded behind
    unmarked.add(flat_case(random, 5000), 0);
    unmarked.pin();
    CHECK_CUDA(kvlc_record(0, 0, &unmarked.options.after) == KVL_OK);
    fake_cuda().event_fails = true;
    CHECK(unmarked.gather() == KVLC_ECUDA && unmarked.copied(0));
    fake_cuda().event_fails = false;
    CHECK_CUDA(kvlc_finish(unmarked.options.after) == KVL_OK);
}

void refused(Fixture &fixture, int status, const char *text) {
    int got = fixture.gather();
    if (got != status || !std::strstr(kvlc_last_error(), text))
        std::printf("status %d, \"%s\"; expected %d, \"%s\"\n", got, kvlc_last_error(), status,
                    text),
            failures++;
}

void refusals() {
    Random random(4);
    Fixture fixture;
    fixture.add(paged_case(random, 64, {3, 0, 2}, 4), 64);
    fixture.payload.assign(fixture.end(), 0);
    refused(fixture, KVLC_EPAGEABLE, "outside registered memory");
    CHECK(kvlc_register(0, fixture.payload.data(), fixture.end(), 1) == KVL_OK);
    refused(fixture, KVLC_EPAGEABLE, "registered readonly");
    CHECK(kvlc_unregister(fixture.payload.data()) == KVL_OK);
    CHECK(kvlc_register(0, fixture.payload.data(), fixture.end() - 1, 0) == KVL_OK);
    refused(fixture, KVLC_EPAGEABLE, "outside registered memory");
    CHECK(kvlc_gather(fixture.payload.data() + 2, fixture.end() - 2, fixture.copies.data(), 0,
                      &fixture.options, nullptr,
                      &fixture.ticket) == KVL_OK);  // nothing to copy, nothing to register
    kvl_copy less = fixture.copies[0];
    less.span.start = 62;
    CHECK(kvlc_gather(fixture.payload.data() + 2, fixture.end() - 2, &less, 1, &fixture.options,
                      nullptr, &fixture.ticket) == KVLC_EPAGEABLE);
    fixture.cases[0].index[1] = 4;
    refused(fixture, KVL_EBOUNDS, "copy 0: index[1] is 4");
    fixture.cases[0].index[1] = 0;
    fixture.copies[0].view.extent = 255;
    refused(fixture, KVL_EBOUNDS, "in memory of 255");
    fixture.copies[0].view.extent = 256;
    fixture.copies[0].span.start = 65;
    refused(fixture, KVL_EBOUNDS, "in a payload of 256");
    fixture.copies[0].span.start = 64;
    fixture.copies.push_back(fixture.copies[0]);
    refused(fixture, KVL_EARGUMENT, "copy 1: a first digest of 0 after 1 digests");
    fixture.copies[1].span.first_digest = KVL_NO_DIGEST;
    refused(fixture, KVL_EOVERLAP, "copy 1: a span at 64 after one that ends at 256");
    fixture.copies.pop_back();
    fixture.cases[0].index[1] = 3;
    CHECK(fixture.scatter() == KVL_EOVERLAP && std::strstr(kvlc_last_error(), "which came before"));
    fixture.cases[0].index[1] = 0;
    fixture.options.device = 5;
    refused(fixture, KVL_EARGUMENT, "device 5 of 1");
    CHECK(kvlc_gather(nullptr, 1, nullptr, 0, &fixture.options, nullptr, &fixture.ticket) ==
          KVL_EARGUMENT);
}

void registration() {
    Bytes memory(4096);
    auto add = [&](size_t from, size_t nbytes, bool readonly = false) {
        return kvlc_register(0, memory.data() + from, nbytes, readonly);
    };
    CHECK(add(1024, 1024) == KVL_OK && add(1024, 1024) == KVL_OK);
    CHECK(add(1024, 512) == KVL_EOVERLAP && add(0, 1025) == KVL_EOVERLAP);
    CHECK(add(2047, 10) == KVL_EOVERLAP && add(1024, 1024, true) == KVL_EOVERLAP);
    CHECK(add(0, 1024) == KVL_OK && add(2048, 10) == KVL_OK);
    for (size_t at : {0, 1024, 2048}) CHECK(kvlc_unregister(memory.data() + at) == KVL_OK);
    CHECK(kvlc_unregister(memory.data()) == KVL_EARGUMENT);
    fake_cuda().readonly_supported = false;
    CHECK(add(0, 10, true) == KVLC_EPAGEABLE && add(0, 0) == KVL_EARGUMENT);
    fake_cuda().readonly_supported = true;
    fake_cuda().refuses_registration = true;
    CHECK(add(0, 10) == KVLC_EPAGEABLE);
    CHECK(std::strstr(kvlc_last_error(), "cudaHostRegister of 10 bytes: a fake error"));
    fake_cuda().refuses_registration = false;
}

void plans() {
    Random random(5);
    Bytes payload(1 << 20);
    auto planned = [&](const Case &made, uint64_t crossover) {
        kvlc::Plan plan(true, reinterpret_cast<char *>(payload.data()), payload.size(),
                        kvlc::kGroup);
        plan.add({made.view, {0, made.nbytes, KVL_NO_DIGEST}}, crossover);
        plan.add({made.view, {made.nbytes, made.nbytes, KVL_NO_DIGEST}}, crossover);
        plan.close();
        return plan;
    };
    Case joined = paged_case(random, 1024, {4, 5, 6, 9, 1, 2}, 10);
    kvlc::Plan plan = planned(joined, 2048);  // three runs of 2048 on average
    CHECK(plan.runs().size() == 6 && plan.tasks().empty() && plan.runs()[0].nbytes == 3072);
    plan = planned(joined, 2049);
    CHECK(plan.runs().empty() && plan.tasks().size() == 2 && plan.groups().size() == 1);
    CHECK(plan.offsets().size() == 6);  // one table for both
    CHECK(plan.tasks()[0].width == 16 && plan.tasks()[0].unit == 16);
    alignas(kvlc::Task) char staged[2 * sizeof(kvlc::Task) + 6 * sizeof(int64_t)];
    CHECK(plan.tables().nbytes == sizeof staged && plan.tables().spans == sizeof staged);
    plan.stage(staged, staged, {plan.mapped(0, 32), plan.mapped(1, 0)});
    auto task = reinterpret_cast<const kvlc::Task *>(staged);
    CHECK(task->payload == plan.tasks()[0].payload + 32);
    CHECK(task[1].offsets == reinterpret_cast<const int64_t *>(task + 2));
    CHECK(task[1].offsets[3] == 9216);

    Case slots = paged_case(random, 16, {0, 3}, 4);  // two in a block of 256, 16 or 18 apart
    slots.memory = random.bytes(512);
    slots.view.base = slots.memory.data(), slots.view.extent = 512;
    slots.view.strides[0] = 256, slots.view.index_split = 2, slots.view.index_stride = 16;
    kvlc::Plan two(true, reinterpret_cast<char *>(payload.data()), payload.size(), kvlc::kGroup);
    two.add({slots.view, {0, 32, KVL_NO_DIGEST}}, kKernel);
    slots.view.index_stride = 18;
    two.add({slots.view, {32, 32, KVL_NO_DIGEST}}, kKernel);
    CHECK(two.offsets() == (std::vector<int64_t>{0, 272, 0, 274}));
    CHECK(two.tasks()[0].width == 16 && two.tasks()[1].width == 2 && two.tasks()[1].unit == 16);

    Case whole = flat_case(random, 4096);
    CHECK(planned(whole, 4096).runs().size() == 2);  // the same view twice is not contiguous

    kvlc::Plan layers(true, reinterpret_cast<char *>(payload.data()), payload.size(), kvlc::kGroup);
    kvl_copy half{whole.view, {0, 2048, KVL_NO_DIGEST}};
    half.view.run = 2048;
    layers.add(half, 0);
    half.view.offset = 2048, half.span.start = 2048;
    layers.add(half, 0);
    layers.close();
    // adjacent, but perhaps of two allocations
    CHECK(layers.runs().size() == 2 && layers.runs()[0].nbytes == 2048);

    constexpr uint64_t kTileBytes = kvlc::kTile * 16;
    alignas(16) static char aligned[8 * kTileBytes];
    Case long_view = paged_case(random, 256, {}, 1);
    long_view.index.assign(5 * kTileBytes / 256 - 1, 0);
    long_view.view.index = long_view.index.data(), long_view.view.sizes[0] = long_view.index.size();
    kvlc::Plan parts(true, aligned, sizeof aligned, 2 * kTileBytes);
    parts.add({long_view.view, {16, 5 * kTileBytes - 256, KVL_NO_DIGEST}}, kKernel);
    parts.close();
    CHECK(parts.groups().size() == 3 && parts.tasks().size() == 3 && parts.offsets().size() == 319);
    for (uint64_t i = 0; i < 3; i++) {
        const kvlc::Piece &piece = parts.pieces()[i];
        CHECK(piece.start == 16 + i * 2 * kTileBytes && piece.packed_at == 0);
        CHECK(piece.nbytes == (i < 2 ? 2 * kTileBytes : kTileBytes - 256));
        CHECK(parts.tasks()[i].skipped == 2 * i && parts.tasks()[i].first_tile == 0);
        CHECK(parts.packed(i, aligned) == aligned - i * 2 * kTileBytes);
    }
    std::vector<kvlc::Run> moved = parts.packed_runs(parts.groups()[1], aligned + 64);
    CHECK(moved.size() == 1 && moved[0].view == aligned + 64);
    CHECK(moved[0].payload == aligned + 16 + 2 * kTileBytes && moved[0].nbytes == 2 * kTileBytes);

    CHECK(kvlc::crossover(1.0, 3.0, 0.9, 256, 256 << 10) ==
          uint64_t((3.0 - 0.9) / 255 * (256 << 10) / (1.05 - 0.9)));
    CHECK(kvlc::crossover(0.5, 3.0, 0.9, 256, 1 << 20) == UINT64_MAX);
    CHECK(kvlc::crossover(1.0, 0.9, 0.9, 256, 1 << 20) == 0);
}

void measured() {
    uint64_t bytes[2] = {7, 7};
    CHECK_CUDA(kvlc_crossover(0, bytes) == KVL_OK);
    uint64_t again[2];
    uint64_t launches = fake_cuda().launches;
    CHECK_CUDA(kvlc_crossover(0, again) == KVL_OK);
    CHECK(bytes[0] == again[0] && bytes[1] == again[1] && fake_cuda().launches == launches);
    Random random(6);
    Fixture fixture;
    fixture.add(flat_case(random, 100), 0);
    fixture.pin();
    fixture.options.crossover = KVLC_MEASURED;
    CHECK_CUDA(fixture.gather() == KVL_OK && kvlc_finish(fixture.ticket) == KVL_OK &&
               fixture.copied(0));
}

void devices() {
    uint64_t count = 0;
    char text[64];
    CHECK(kvlc_version() == KVLC_ABI && kvlc_devices(&count) == KVL_OK && count == 1);
    CHECK(kvlc_describe(0, text, sizeof text) == KVL_OK && !std::strcmp(text, "cuda 13.0, Fake"));
    fake_cuda().devices = 0;
    CHECK(kvlc_devices(&count) == KVLC_ENODEVICE);
    CHECK(std::strstr(kvlc_last_error(), "no CUDA device"));
    fake_cuda().devices = 1;
}

}  // namespace

void test_cuda() {
    another_device();
    devices();
    plans();
    registration();
    refusals();
    measured();
    the_callers_stream();
    after_what_was_recorded();
    wrong_predecessors();
    while_another_thread_captures();
    no_call_off_the_device();
    progress();
    digests_of_what_arrived();
    digests_in_order();
    a_failure_midway();
    copies_of_both_kinds();
    for (int eager : {0, 1, 2}) {
        fake_cuda().eager = eager;
        long_views(0, 9000);
    }
    fake_cuda().eager = 0;
    many_streams();
    many_threads();
    no_memory_to_pack_in();
}
