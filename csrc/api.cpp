// SPDX-License-Identifier: Apache-2.0
// The C interface: exceptions become a status and the thread's last error.
#include <cstdio>
#include <cstring>
#include <new>

#include "failure.h"
#include "header.h"
#include "job.h"
#include "kernel.h"
#include "kvlink.h"
#include "opening.h"
#include "tensor_views.h"

namespace kvl {
namespace {

thread_local char last_error[320];

int set_error(int status, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    return status;
}

// Run `body`, which keeps the index of its current copy in the report.
template <class Body>
int guarded(kvl_report *report, Body body) {
    kvl_report unused{};
    kvl_report &current = report ? *report : unused;
    current = kvl_report{};
    try {
        int status = body(current);
        if (status == KVL_EDIGEST) {
            char text[128];
            snprintf(text, sizeof text, "copy %llu, MiB %llu: the bytes do not match the digest",
                     (unsigned long long)current.copy, (unsigned long long)current.chunk);
            return set_error(status, text);
        }
        if (status == KVL_EDEADLINE)
            return set_error(status, "the deadline passed before everything was done");
        return status;
    } catch (const Failure &failure) {
        char text[320];
        snprintf(text, sizeof text, "copy %llu: %s", (unsigned long long)current.copy,
                 failure.text);
        return set_error(failure.status, text);
    } catch (const std::bad_alloc &) {
        return set_error(KVL_ENOMEM, "out of memory");
    } catch (...) { return set_error(KVL_ENOMEM, "the system refused a resource"); }
}

struct Payload {
    const void *bytes;
    uint64_t nbytes;
    const uint32_t *digests;
    uint64_t num_digests;
};

template <class Entry>
int run(Mode mode, bool compare, const Payload &payload, const Entry *entries, uint64_t count,
        const kvl_options *options, kvl_report *report) {
    return guarded(report, [&](kvl_report &current) {
        if ((!payload.bytes && payload.nbytes) || (!entries && count) ||
            (!payload.digests && payload.num_digests))
            fail(KVL_EARGUMENT, "a null pointer with a size that is not 0");
        // `mode` and `compare` decide which of them is written; the interface has them const.
        Job job(mode, compare, static_cast<char *>(const_cast<void *>(payload.bytes)),
                payload.nbytes, const_cast<uint32_t *>(payload.digests), payload.num_digests);
        for (; current.copy < count; current.copy++) {
            if constexpr (sizeof(Entry) == sizeof(kvl_copy))
                job.add(entries[current.copy].span, &entries[current.copy].view, current.copy);
            else
                job.add(entries[current.copy], nullptr, current.copy);
        }
        current.copy = 0;
        return job.run(options ? *options : kvl_options{}, current);
    });
}

}  // namespace
}  // namespace kvl

using kvl::Mode;

int kvl_version(void) { return KVL_ABI; }

uint32_t kvl_crc32c(uint32_t crc, const void *data, uint64_t nbytes) {
    return ~kvl::kernel().crc(~crc, data, nbytes);
}

const char *kvl_features(void) { return kvl::kernel().name; }

const char *kvl_last_error(void) { return kvl::last_error; }

int kvl_select(const char *features) {
    if (features && kvl::select_kernel(features)) return KVL_OK;
    char text[128];
    snprintf(text, sizeof text, "this processor has no instruction set '%.40s' that is known here",
             features ? features : "");
    return kvl::set_error(KVL_EUNSUPPORTED, text);
}

int kvl_gather(void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
               uint32_t *digests, uint64_t num_digests, const kvl_options *options,
               kvl_report *report) {
    return kvl::run(Mode::gather, false, {payload, nbytes, digests, num_digests}, copies, count,
                    options, report);
}

int64_t kvl_gather_dense(void *payload, uint64_t nbytes, uint64_t start, const void *source,
                         uint64_t length, int digest) {
    uint32_t crc = 0;
    bool has_digest = digest && length;
    kvl_view view{
        const_cast<void *>(source), length, 0, length, {1, 1, 1, 1}, {}, nullptr, 0, 1, 0};
    kvl_copy copy{view, {start, length, has_digest ? 0 : KVL_NO_DIGEST}};
    kvl_options options{1, KVL_STORES_AUTO, 0};
    // There is space for one digest, so that more than KVL_CHUNK bytes are refused.
    int status = kvl::run(Mode::gather, false, {payload, nbytes, &crc, has_digest}, &copy, 1,
                          &options, nullptr);
    return status ? -int64_t{status} : int64_t{crc};
}

int kvl_pack(void *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout *layout,
             const char *quoted_id, uint64_t quoted_id_nbytes, const void *const *sources) {
    return kvl::guarded(nullptr, [&](kvl_report &current) {
        if (!payload || !layout || !quoted_id || (!sources && layout->count))
            kvl::fail(KVL_EARGUMENT, "a null pointer");
        kvl::pack(static_cast<char *>(payload), nbytes, header_nbytes, *layout, quoted_id,
                  quoted_id_nbytes, sources, current.copy);
        return KVL_OK;
    });
}

int kvl_pack_tensors(void *payload, uint64_t nbytes, uint64_t header_nbytes,
                     const kvl_layout *layout, const char *id, uint64_t id_nbytes,
                     void *const *objects, kvl_describe describe) {
    return kvl::guarded(nullptr, [&](kvl_report &current) {
        if (!payload || !layout || !id || !describe || (!objects && layout->count) ||
            (!layout->pieces && layout->count))
            kvl::fail(KVL_EARGUMENT, "a null pointer");
        bool is_packed = kvl::pack_tensors(static_cast<char *>(payload), nbytes, header_nbytes,
                                           *layout, id, id_nbytes, objects, describe, current.copy);
        return is_packed ? KVL_OK : KVL_EUNSUPPORTED;
    });
}

void kvl_set_interpreter(const kvl_interpreter *interpreter) {
    if (interpreter) kvl::set_interpreter(*interpreter);
}

int kvl_make_views(void *data, uint64_t nbytes, const kvl_layout *layout, uint64_t first,
                   uint64_t count, void *owner, void *list, kvl_make make) {
    return kvl::guarded(nullptr, [&](kvl_report &current) {
        if (!data || !layout || !owner || !list || !make || (!layout->pieces && layout->count))
            kvl::fail(KVL_EARGUMENT, "a null pointer");
        return kvl::make_views(static_cast<char *>(data), nbytes, *layout, first, count, owner,
                               list, make, current.copy);
    });
}

int kvl_open(void *payload, uint64_t nbytes, uint64_t header_nbytes, const kvl_layout *layout,
             const char *id, uint64_t id_nbytes, void *owner, void *list, kvl_make make) {
    return kvl::guarded(nullptr, [&](kvl_report &current) {
        if (!payload || !layout || !id || !owner || !list || !make ||
            (!layout->pieces && layout->count))
            kvl::fail(KVL_EARGUMENT, "a null pointer");
        return kvl::open_payload(static_cast<char *>(payload), nbytes, header_nbytes, *layout, id,
                                 id_nbytes, owner, list, make, current.copy);
    });
}

uint64_t kvl_match(const char *text, uint64_t nbytes, const kvl_layout *layout) {
    return text && layout ? kvl::match(text, nbytes, *layout) : 0;
}

int kvl_is_packed(const void *payload, uint64_t nbytes, uint64_t header_nbytes,
                  const kvl_layout *layout, const char *quoted_id, uint64_t quoted_id_nbytes,
                  int digests) {
    return payload && layout && quoted_id &&
           kvl::is_packed(static_cast<const char *>(payload), nbytes, header_nbytes, *layout,
                          quoted_id, quoted_id_nbytes, digests);
}

int kvl_scatter(const void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                const uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                kvl_report *report) {
    return kvl::run(Mode::scatter, true, {payload, nbytes, digests, num_digests}, copies, count,
                    options, report);
}

int kvl_digest(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
               uint32_t *digests, uint64_t num_digests, const kvl_options *options,
               kvl_report *report) {
    return kvl::run(Mode::scan, false, {payload, nbytes, digests, num_digests}, spans, count,
                    options, report);
}

int kvl_verify(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
               const uint32_t *digests, uint64_t num_digests, const kvl_options *options,
               kvl_report *report) {
    return kvl::run(Mode::scan, true, {payload, nbytes, digests, num_digests}, spans, count,
                    options, report);
}
