/* The whole C interface of omni_kvlink's host copier: plain structs, int status, no exceptions.
 *
 * A *payload* is one span of memory that holds tensors one after another. A *view* is where a
 * tensor lies outside it: strided, and perhaps in pages. `kvl_gather` copies views into the
 * payload, `kvl_scatter` copies the payload into views; both read each byte once, and compute the
 * digests in the same pass. Every argument is checked against the sizes given before a byte moves.
 *
 * All fields have 64 bits, so that a caller without this header can pack them as integers.
 */
#ifndef KVLINK_H
#define KVLINK_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVL_API __attribute__((visibility("default")))

/* Raised with every change of a struct or a function below; callers compare it. */
#define KVL_ABI 1
#define KVL_DIMS 4
/* One CRC-32C (Castagnoli) for each started MiB of a span. */
#define KVL_CHUNK 1048576
#define KVL_NO_DIGEST UINT64_MAX

enum kvl_status {
    KVL_OK = 0,
    KVL_EARGUMENT = 1,    /* arguments that contradict each other */
    KVL_EBOUNDS = 2,      /* bytes outside the sizes given, or an index outside its limit */
    KVL_EOVERLAP = 3,     /* memory that would be written twice, or read and written at once */
    KVL_EDIGEST = 4,      /* bytes that are not those whose digest was given */
    KVL_ENOMEM = 5,
    KVL_EUNSUPPORTED = 6, /* this processor cannot do what was asked */
};

/* Where a tensor lies: `sizes` from the outermost dimension to the innermost (1 where unused),
 * below them `run` contiguous bytes.
 *
 * With `index`, the outermost dimension is looked up: entry i of it is
 *   index[i] / index_split * strides[0] + index[i] % index_split * index_stride.
 * Block ids have index_split 1. A slot mapping has index_split = slots in a block, strides[0] =
 * from block to block, index_stride = from slot to slot. */
typedef struct kvl_view {
    void *base;           /* nothing before it, or from base + extent on, is touched */
    uint64_t extent;
    int64_t offset;       /* of the first byte, from base */
    uint64_t run;
    uint64_t sizes[KVL_DIMS];
    int64_t strides[KVL_DIMS]; /* in bytes */
    const int64_t *index; /* sizes[0] entries, or NULL */
    uint64_t index_limit; /* every entry is below it */
    uint64_t index_split;
    int64_t index_stride;
} kvl_view;

/* A tensor's place in the payload, and its first digest's in `digests` (KVL_NO_DIGEST: none).
 * An indexed view may be longer than the span by a part of its last entry. */
typedef struct kvl_span {
    uint64_t start;
    uint64_t nbytes;
    uint64_t first_digest;
} kvl_span;

typedef struct kvl_copy {
    kvl_view view;
    kvl_span span;
} kvl_copy;

enum kvl_stores {
    KVL_STORES_AUTO = 0,   /* by size */
    KVL_STORES_CACHED = 1, /* ordinary ones: the reader finds the bytes in the cache */
    KVL_STORES_STREAM = 2, /* past the cache: memory to be overwritten is not read first */
};

typedef struct kvl_options {
    uint64_t threads; /* 0: by size and by how many cores are idle */
    uint64_t stores;
} kvl_options;

/* What a call did; on an error, which copy and which chunk of it. */
typedef struct kvl_report {
    uint64_t copy;
    uint64_t chunk;
    uint64_t threads;
} kvl_report;

/* KVL_ABI of the library. */
KVL_API int kvl_version(void);

/* The instruction set in use: "avx512+clmul", "avx512", "avx2" or "portable". */
KVL_API const char *kvl_features(void);

/* Choose one by name, or the best with "auto"; not while copies are under way. */
KVL_API int kvl_select(const char *features);

/* The calling thread's last error in words. */
KVL_API const char *kvl_last_error(void);

/* Views into the payload. Spans ascend without overlap; digests are written. */
KVL_API int kvl_gather(void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                       uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

/* The payload into views, none of which may write a byte twice. Digests are compared in the same
 * pass: with KVL_EDIGEST the targets hold bytes that are not to be used. */
KVL_API int kvl_scatter(const void *payload, uint64_t nbytes, const kvl_copy *copies,
                        uint64_t count, const uint32_t *digests, uint64_t num_digests,
                        const kvl_options *options, kvl_report *report);

/* The digests of bytes that are in the payload already. */
KVL_API int kvl_digest(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
                       uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

/* The same, compared with those given; KVL_EDIGEST names the first that differs. */
KVL_API int kvl_verify(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
                       const uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

#ifdef __cplusplus
}
#endif
#endif
