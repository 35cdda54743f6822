// SPDX-License-Identifier: Apache-2.0
// Invalid arguments are refused with a status and a text, and nothing is written.
#include <cstring>
#include <string>

#include "../dlpack.h"
#include "check.h"

namespace {

struct Refusal {
    Bytes memory = Bytes(4096, 1), payload = Bytes(2048, 2);
    std::vector<int64_t> index{3, 0, 2};
    kvl_copy copy{};
    std::vector<uint32_t> digests{7};
    uint64_t nbytes = 2048;

    Refusal() {
        // Three rows of 256 bytes, 512 apart.
        copy.view = {memory.data(),  memory.size(), 0, 256, {1, 1, 1, 3},
                     {0, 0, 0, 512}, nullptr,       0, 1,   0};
        copy.span = {64, 768, 0};
    }
    void by_index() {
        copy.view.sizes[0] = 3, copy.view.strides[0] = 512;
        copy.view.sizes[3] = 1, copy.view.strides[3] = 0;
        copy.view.index = index.data(), copy.view.index_limit = 8;
    }
    void refused(int status, const char *text, bool scatter = false) {
        Bytes memory_before = memory, payload_before = payload;
        kvl_report report{};
        int got = scatter ? kvl_scatter(payload.data(), nbytes, &copy, 1, digests.data(),
                                        digests.size(), nullptr, &report)
                          : kvl_gather(payload.data(), nbytes, &copy, 1, digests.data(),
                                       digests.size(), nullptr, &report);
        bool matches = std::strstr(kvl_last_error(), text) != nullptr;
        if (got != status || !matches)
            std::printf("status %d, \"%s\"; wanted %d, \"%s\"\n", got, kvl_last_error(), status,
                        text);
        CHECK(got == status && matches);
        CHECK(memory == memory_before && payload == payload_before && digests[0] == 7);
    }
};

template <class Change>
void check(int status, const char *text, Change change, bool scatter = false) {
    Refusal r;
    change(r);
    r.refused(status, text, scatter);
}

void test_bounds() {
    check(KVL_EBOUNDS, "0 to 1280 in memory of 1279",
          [](Refusal &r) { r.copy.view.extent = 1279; });
    check(KVL_EBOUNDS, "bytes -1 to", [](Refusal &r) { r.copy.view.offset = -1; });
    check(KVL_EBOUNDS, "bytes -1024 to", [](Refusal &r) { r.copy.view.strides[3] = -512; });
    check(KVL_EARGUMENT, "stride", [](Refusal &r) { r.copy.view.strides[3] = INT64_MAX; });
    check(KVL_EARGUMENT, "size", [](Refusal &r) { r.copy.view.sizes[3] = UINT64_MAX; });
    check(KVL_EARGUMENT, "size 0", [](Refusal &r) { r.copy.view.sizes[0] = 0; });
    check(KVL_EARGUMENT, "run of 0", [](Refusal &r) { r.copy.view.run = 0; });
    check(KVL_EARGUMENT, "without memory", [](Refusal &r) { r.copy.view.base = nullptr; });
    check(KVL_EBOUNDS, "768 bytes for a span of 769", [](Refusal &r) { r.copy.span.nbytes = 769; });
    check(KVL_EBOUNDS, "in a payload of 2048", [](Refusal &r) { r.copy.span.start = 1281; });
    check(KVL_EBOUNDS, "in a payload of 2048", [](Refusal &r) { r.copy.span.start = UINT64_MAX; });
    check(KVL_EBOUNDS, "digests 1 to 2 of 1", [](Refusal &r) { r.copy.span.first_digest = 1; });
}

void test_indices() {
    check(KVL_EBOUNDS, "index[1] is 8", [](Refusal &r) {
        r.by_index();
        r.index[1] = 8;
    });
    check(KVL_EBOUNDS, "index[2] is -1", [](Refusal &r) {
        r.by_index();
        r.index[2] = -1;
    });
    check(KVL_EBOUNDS, "to 4352", [](Refusal &r) {
        r.by_index();
        r.copy.view.index_limit = 9;
    });
    check(KVL_EARGUMENT, "split 0", [](Refusal &r) {
        r.by_index();
        r.copy.view.index_split = 0;
    });
    check(KVL_EBOUNDS, "for a span", [](Refusal &r) {
        r.by_index();
        r.copy.span.nbytes = 512;
    });
    check(
        KVL_EOVERLAP, "came before",
        [](Refusal &r) {
            r.by_index();
            r.index[2] = 3;
        },
        true);
}

void test_overlaps() {
    check(KVL_EOVERLAP, "overlaps itself", [](Refusal &r) { r.copy.view.strides[3] = 255; }, true);
    check(KVL_EOVERLAP, "overlaps itself", [](Refusal &r) { r.copy.view.strides[3] = 0; }, true);
    {
        Refusal r;
        r.copy.view.base = r.payload.data();
        r.copy.view.extent = r.payload.size();
        r.refused(KVL_EOVERLAP, "same memory");
    }
    Refusal r;
    kvl_copy both[2] = {r.copy, r.copy};
    both[1].span.start = both[0].span.start + 767;
    CHECK(kvl_gather(r.payload.data(), 2048, both, 2, r.digests.data(), 1, nullptr, nullptr) ==
          KVL_EOVERLAP);
    CHECK(std::strstr(kvl_last_error(), "copy 1: a span at 831") != nullptr);
}

void test_calls() {
    Refusal r;  // valid as it is
    CHECK(kvl_gather(r.payload.data(), 2048, &r.copy, 1, r.digests.data(), 1, nullptr, nullptr) ==
          KVL_OK);
    kvl_options options{0, 9, 0};
    CHECK(kvl_gather(r.payload.data(), 2048, &r.copy, 1, r.digests.data(), 1, &options, nullptr) ==
          KVL_EARGUMENT);
    CHECK(kvl_gather(nullptr, 2048, &r.copy, 1, r.digests.data(), 1, nullptr, nullptr) ==
          KVL_EARGUMENT);
    CHECK(kvl_gather(r.payload.data(), 2048, nullptr, 0, nullptr, 0, nullptr, nullptr) == KVL_OK);
    Bytes long_one(KVL_CHUNK + 1), payload(KVL_CHUNK + 2);
    auto dense = [&](uint64_t start, const void *source, uint64_t nbytes, int digest) {
        return kvl_gather_dense(payload.data(), payload.size(), start, source, nbytes, digest);
    };
    CHECK(dense(1, long_one.data(), KVL_CHUNK + 1, 0) == 0);
    CHECK(dense(1, long_one.data(), KVL_CHUNK + 1, 1) == -KVL_EBOUNDS);  // two digests
    CHECK(dense(2, long_one.data(), KVL_CHUNK + 1, 0) == -KVL_EBOUNDS);
    CHECK(dense(0, payload.data() + 15, 16, 1) == -KVL_EOVERLAP);
    CHECK(dense(0, nullptr, 16, 1) == -KVL_EARGUMENT);
    CHECK(dense(0, nullptr, 0, 1) == 0);
    CHECK(kvl_select("mmx") == KVL_EUNSUPPORTED);
    CHECK(kvl_select(nullptr) == KVL_EUNSUPPORTED);
    CHECK(kvl_version() == KVL_ABI);
    CHECK(kvl_crc32c(0, "123456789", 9) == 0xE3069283);  // RFC 3720
    CHECK(kvl_crc32c(kvl_crc32c(0, "1234", 4), "56789", 5) == 0xE3069283);
}

void test_packing() {
    Bytes payload(KVL_CHUNK + 200, 7), source(KVL_CHUNK + 1);
    kvl_piece piece = span_of(0, 16, 1);
    kvl_layout layout{"{00000000", 9, 1, ":00000000}", 10, 1, 8, &piece, 1};
    const void *sources[]{source.data()};
    auto pack = [&](uint64_t nbytes, uint64_t header) {
        return kvl_pack(payload.data(), nbytes, header, &layout, "id", 2, sources);
    };
    CHECK(pack(45, 29) == KVL_OK);
    CHECK(payload[45] == 7);
    CHECK(pack(44, 29) == KVL_EBOUNDS);
    CHECK(pack(45, 28) == KVL_EBOUNDS);
    CHECK(pack(45, 46) == KVL_EBOUNDS);
    CHECK(pack(45, 7) == KVL_EBOUNDS);
    piece.nbytes = KVL_CHUNK + 1;
    CHECK(pack(payload.size(), 29) == KVL_EBOUNDS);  // two digests
    piece = span_of(UINT64_MAX, 16, 1);
    CHECK(pack(45, 29) == KVL_EBOUNDS);
    piece = span_of(0, 16, 3);
    CHECK(pack(45, 29) == KVL_EBOUNDS);
    piece = span_of(0, 16, 1);
    for (uint64_t at : {0, 28, 44}) {
        sources[0] = payload.data() + at;
        CHECK(pack(45, 29) == KVL_EOVERLAP);
    }
    sources[0] = nullptr;
    CHECK(pack(45, 29) == KVL_EARGUMENT);
    kvl_piece both[]{span_of(4, 4, KVL_NO_DIGEST), span_of(7, 4, KVL_NO_DIGEST)};
    const void *two[]{source.data(), source.data()};
    layout.pieces = both;
    layout.count = 2;
    CHECK(kvl_pack(payload.data(), 60, 29, &layout, "id", 2, two) == KVL_EBOUNDS);
    CHECK(kvl_pack(nullptr, 45, 29, &layout, "id", 2, two) == KVL_EARGUMENT);
    CHECK(kvl_pack(payload.data(), 45, 29, nullptr, "id", 2, two) == KVL_EARGUMENT);
    CHECK(kvl_pack(payload.data(), 45, 29, &layout, nullptr, 2, two) == KVL_EARGUMENT);
    CHECK(kvl_pack(payload.data(), 45, 29, &layout, "id", 2, nullptr) == KVL_EARGUMENT);
    CHECK(kvl_match(nullptr, 0, &layout) == 0);
    CHECK(kvl_match("", 0, nullptr) == 0);
    layout.crc = 2;
    CHECK(kvl_pack(payload.data(), 45, 29, &layout, "id", 2, two) == KVL_EARGUMENT);
    CHECK(kvl_match("{00000000", 9, &layout) == 0);
}

// An object is its own DLTensor; one without memory cannot be described.
int describe(void *object, void *tensor) {
    std::memcpy(tensor, object, sizeof(kvl::DenseTensor));
    return static_cast<kvl::DenseTensor *>(object)->data ? 0 : -1;
}

void test_packing_tensors() {
    Bytes source(30, 3), by_address(60), payload(60, 7);
    int64_t sizes[]{4, 1, 2}, strides[]{2, 9, 1}, other_sizes[]{2, 2, 2};
    uint64_t bfloat16 = 4 | 16 << 8 | 1 << 16;
    kvl_piece piece{0, 16, 1, bfloat16, 3, sizes};
    kvl_layout layout{"{00000000", 9, 1, ":00000000}", 10, 1, 8, &piece, 1};
    const void *sources[]{source.data() + 2};
    CHECK(kvl_pack(by_address.data(), 49, 33, &layout, "\\\"id\\\"", 6, sources) == KVL_OK);
    const kvl::DenseTensor right{source.data(), 1, 0, 3, 4, 16, 1, sizes, strides, 2};
    kvl::DenseTensor tensor = right;
    void *objects[]{&tensor};
    auto pack = [&](const std::string &id) {
        return kvl_pack_tensors(payload.data(), 27 + id.size() + 20, 27 + id.size() + 4, &layout,
                                id.data(), id.size(), objects, describe);
    };
    auto refused = [&] {
        bool is_refused = pack("id") == KVL_EUNSUPPORTED && payload == Bytes(60, 7);
        tensor = right;
        return is_refused;
    };
    tensor.data = nullptr;
    CHECK(refused());
    tensor.device_type = 2;
    CHECK(refused());
    tensor.code = 2;
    CHECK(refused());
    tensor.bits = 8;
    CHECK(refused());
    tensor.lanes = 2;
    CHECK(refused());
    tensor.rank = 2;
    CHECK(refused());
    tensor.rank = -1;
    CHECK(refused());
    tensor.sizes = other_sizes;
    CHECK(refused());
    strides[0] = 3;
    CHECK(refused());
    strides[0] = 2;
    for (const char *id : {"", "a b", "\"", "\xc3\xa9"}) CHECK(pack(id) == KVL_EUNSUPPORTED);
    CHECK(pack(std::string(KVL_MAX_ID + 1, 'x')) == KVL_EUNSUPPORTED);
    CHECK(payload == Bytes(60, 7));
    layout.count = KVL_MAX_TENSORS + 1;
    CHECK(refused());
    layout.count = 1;
    CHECK(pack("id") == KVL_OK);
    by_address.resize(49);
    by_address.resize(60, 7);
    CHECK(payload == by_address);
    tensor.strides = nullptr;
    CHECK(pack("id") == KVL_OK);
    CHECK(payload == by_address);
    auto call = [&](void *to, const kvl_layout *of, const char *id, void **from, kvl_describe by) {
        return kvl_pack_tensors(to, 49, 33, of, id, 2, from, by);
    };
    uint8_t *to = payload.data();
    CHECK(call(nullptr, &layout, "id", objects, describe) == KVL_EARGUMENT);
    CHECK(call(to, nullptr, "id", objects, describe) == KVL_EARGUMENT);
    CHECK(call(to, &layout, nullptr, objects, describe) == KVL_EARGUMENT);
    CHECK(call(to, &layout, "id", nullptr, describe) == KVL_EARGUMENT);
    CHECK(call(to, &layout, "id", objects, nullptr) == KVL_EARGUMENT);
    CHECK(kvl_pack_tensors(to, 48, 33, &layout, "id", 2, objects, describe) == KVL_EBOUNDS);
    layout.pieces = nullptr;
    CHECK(call(to, &layout, "id", objects, describe) == KVL_EARGUMENT);
}

// An interpreter whose objects are the managed tensors themselves; its lists are arrays.
struct FakeInterpreter {
    int owners = 0, locks = 0, made = 0, most = 2;
    bool runs = true;
    void *last = nullptr;
} fake;
const kvl_interpreter kInterpreter{
    [] { return int(fake.runs); },
    [] { return ++fake.locks; },
    [](int) { fake.locks--; },
    [](void *owner) { *static_cast<int *>(owner) += 1; },
    [](void *owner) { *static_cast<int *>(owner) -= fake.locks; },
    [](void *list, int64_t at, void *object) {
        static_cast<void **>(list)[at] = object;
        return 0;
    },
};

int make(void *tensor, void **object) {
    *object = fake.last = tensor;
    return fake.made++ < fake.most ? 0 : -1;
}

void test_making_views() {
    Bytes data(64);
    int64_t sizes[]{3, 1, 2};
    kvl_piece pieces[]{span_of(0, 4, KVL_NO_DIGEST),
                       {8, 12, KVL_NO_DIGEST, 4 | 16 << 8 | 1 << 16, 3, sizes},
                       span_of(60, 4, KVL_NO_DIGEST)};
    kvl_layout layout{"", 0, 0, "", 0, 0, 0, pieces, 3};
    void *list[3]{};
    auto call = [&](uint64_t nbytes, uint64_t first, uint64_t count) {
        return kvl_make_views(data.data(), nbytes, &layout, first, count, &fake.owners, list, make);
    };
    CHECK(call(64, 0, 3) == KVL_EARGUMENT);  // no interpreter
    kvl_set_interpreter(nullptr);
    kvl_set_interpreter(&kInterpreter);
    CHECK(call(64, 4, 0) == KVL_EARGUMENT);
    CHECK(call(64, 1, 3) == KVL_EARGUMENT);
    CHECK(call(64, UINT64_MAX, 2) == KVL_EARGUMENT);
    CHECK(call(63, 2, 1) == KVL_EBOUNDS);
    CHECK(call(59, 2, 1) == KVL_EBOUNDS);
    CHECK(fake.owners == 0 && fake.made == 0);
    CHECK(call(64, 3, 0) == KVL_OK);
    CHECK(call(64, 1, 2) == KVL_OK);
    CHECK(fake.owners == 2 && !list[2]);
    auto first = static_cast<kvl::ManagedTensor *>(list[0]);
    auto second = static_cast<kvl::ManagedTensor *>(list[1]);
    CHECK(first->major == 1 && !first->flags);
    const kvl::DenseTensor &tensor = first->tensor;
    CHECK(tensor.data == data.data() + 8 && tensor.device_type == 1 && tensor.rank == 3);
    CHECK(tensor.code == 4 && tensor.bits == 16 && tensor.lanes == 1 && !tensor.byte_offset);
    for (int i = 0; i < 3; i++) {
        int64_t strides[]{2, 2, 1};
        CHECK(tensor.sizes[i] == sizes[i] && tensor.strides[i] == strides[i]);
    }
    CHECK(second->tensor.data == data.data() + 60 && second->tensor.rank == 0);
    first->deleter(first);
    CHECK(fake.owners == 1 && fake.locks == 0);
    CHECK(call(64, 0, 1) == KVL_EUNSUPPORTED);  // `make` fails: who has that one is not known
    CHECK(fake.owners == 2);
    auto lost = static_cast<kvl::ManagedTensor *>(fake.last);
    fake.runs = false;
    second->deleter(second);
    CHECK(fake.owners == 2);
    fake.runs = true;
    lost->deleter(lost);
    CHECK(fake.owners == 1);  // the second's, which was freed when the interpreter had ended
    auto refused = [&](void *to, const kvl_layout *of, void *owner, void *into, kvl_make by) {
        return kvl_make_views(to, 64, of, 0, 1, owner, into, by) == KVL_EARGUMENT;
    };
    CHECK(refused(nullptr, &layout, &fake, list, make));
    CHECK(refused(data.data(), nullptr, &fake, list, make));
    CHECK(refused(data.data(), &layout, nullptr, list, make));
    CHECK(refused(data.data(), &layout, &fake, nullptr, make));
    CHECK(refused(data.data(), &layout, &fake, list, nullptr));
    layout.pieces = nullptr;
    CHECK(refused(data.data(), &layout, &fake, list, make));
}

// A payload is opened if its header is as expected, byte for byte; else nothing is made.
void test_opening() {
    const std::string before = "{00000000,\"", after = "}", id = "\\\"id\\\"";
    int64_t sizes[]{4};
    kvl_piece piece{0, 4, KVL_NO_DIGEST, 1 | 8 << 8 | 1 << 16, 1, sizes};
    kvl_layout layout{before.data(), before.size(), 1, after.data(), after.size(), 0, 0, &piece, 1};
    uint64_t header = 8 + before.size() + id.size() + after.size() + 3, total = header + 4;
    Bytes payload(total);
    const void *sources[]{"four"};
    CHECK(kvl_pack(payload.data(), total, header, &layout, id.data(), id.size(), sources) == 0);
    fake.owners = fake.made = 0;
    void *list[1]{};
    auto call = [&](uint64_t nbytes, uint64_t header_nbytes, const char *key) {
        return kvl_open(payload.data(), nbytes, header_nbytes, &layout, key, strlen(key),
                        &fake.owners, list, make);
    };
    for (const char *key : {"", "i", "ie", "idd", "id\\"}) CHECK(call(total, header, key) == 6);
    for (uint64_t nbytes : {uint64_t{0}, uint64_t{7}, header - 1, header + 1})
        CHECK(call(total, nbytes, "id") == KVL_EUNSUPPORTED);
    CHECK(call(header - 1, header, "id") == KVL_EUNSUPPORTED);
    CHECK(call(total, UINT64_MAX, "id") == KVL_EUNSUPPORTED);
    CHECK(call(total - 1, header, "id") == KVL_EBOUNDS);
    for (uint64_t at = 0; at < header; at++) {
        payload[at] ^= 1;
        CHECK(call(total, header, "id") == KVL_EUNSUPPORTED);
        payload[at] ^= 1;
    }
    CHECK(!fake.made && !fake.owners && !list[0]);
    CHECK(call(total, header, "id") == KVL_OK);
    auto made = static_cast<kvl::ManagedTensor *>(list[0]);
    CHECK(made->tensor.data == payload.data() + header && fake.owners == 1);
    made->deleter(made);
    auto refused = [&](void *to, const kvl_layout *of, const char *key, void *owner, void *into,
                       kvl_make by) {
        return kvl_open(to, total, header, of, key, 2, owner, into, by) == KVL_EARGUMENT;
    };
    CHECK(refused(nullptr, &layout, "id", &fake, list, make));
    CHECK(refused(payload.data(), nullptr, "id", &fake, list, make));
    CHECK(refused(payload.data(), &layout, nullptr, &fake, list, make));
    CHECK(refused(payload.data(), &layout, "id", nullptr, list, make));
    CHECK(refused(payload.data(), &layout, "id", &fake, nullptr, make));
    CHECK(refused(payload.data(), &layout, "id", &fake, list, nullptr));
    layout.pieces = nullptr;
    CHECK(refused(payload.data(), &layout, "id", &fake, list, make));
}

void test_verifying_packed() {
    Bytes payload(KVL_CHUNK + 200), source(KVL_CHUNK + 1, 3);
    kvl_piece piece = span_of(0, 16, 1);
    kvl_layout layout{"{00000000", 9, 1, ":00000000}", 10, 1, 8, &piece, 1};
    const void *sources[]{source.data()};
    CHECK(kvl_pack(payload.data(), 49, 33, &layout, "\\\"id\\\"", 6, sources) == KVL_OK);
    auto verify = [&](uint64_t nbytes, uint64_t header) {
        return kvl_is_packed(payload.data(), nbytes, header, &layout, "\\\"id\\\"", 6, 1);
    };
    CHECK(verify(49, 33));
    CHECK(!verify(48, 33));
    CHECK(!verify(49, 32));
    CHECK(!verify(49, 50));
    CHECK(!verify(49, 7));
    piece.nbytes = KVL_CHUNK + 1;
    CHECK(!verify(payload.size(), 33));  // two digests
    piece = span_of(UINT64_MAX, 16, 1);
    CHECK(!verify(49, 33));
    piece = span_of(0, 16, 3);
    CHECK(!verify(49, 33));
    piece = span_of(0, 15, 1);
    CHECK(!verify(49, 33));
    piece = span_of(0, 16, KVL_NO_DIGEST);
    CHECK(verify(49, 33));
    const char *id = "\\\"id\\\"";
    CHECK(!kvl_is_packed(nullptr, 49, 33, &layout, id, 6, 1));
    CHECK(!kvl_is_packed(payload.data(), 49, 33, nullptr, id, 6, 1));
    CHECK(!kvl_is_packed(payload.data(), 49, 33, &layout, nullptr, 6, 1));
    CHECK(!kvl_is_packed(payload.data(), 49, 33, &layout, id, UINT64_MAX, 1));
    CHECK(!kvl_is_packed(payload.data(), 49, 33, &layout, id, 5, 1));
    CHECK(!kvl_is_packed(payload.data(), 49, 33, &layout, id, 7, 1));
    layout.after = nullptr;
    CHECK(!verify(49, 33));
}

}  // namespace

void test_refusals() {
    test_bounds();
    test_indices();
    test_overlaps();
    test_calls();
    test_packing();
    test_packing_tensors();
    test_making_views();
    test_opening();
    test_verifying_packed();
}
