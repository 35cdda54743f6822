// SPDX-License-Identifier: Apache-2.0
/* The whole C interface of omni_kvlink's host copier: plain structs, int status, no exceptions.
 *
 * A *payload* is one span of memory that holds tensors one after another. A *view* describes
 * a tensor outside it: strided, or paged. `kvl_gather` copies views into the
 * payload, `kvl_scatter` copies the payload into views; both read each byte once, and compute the
 * digests in the same pass. Every argument is checked against the given sizes before a byte is
 * copied.
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

/* Incremented with every change of a struct or function below; callers compare it. */
#define KVL_ABI 9
#define KVL_DIMS 4
/* One CRC-32C (Castagnoli) for each started MiB of a span. */
#define KVL_CHUNK 1048576
#define KVL_NO_DIGEST UINT64_MAX

enum kvl_status {
    KVL_OK = 0,
    KVL_EARGUMENT = 1, /* arguments that contradict each other */
    KVL_EBOUNDS = 2,   /* bytes outside the sizes given, or an index outside its limit */
    KVL_EOVERLAP = 3,  /* memory that would be written twice, or read and written at once */
    KVL_EDIGEST = 4,   /* bytes that do not match the given digest */
    KVL_ENOMEM = 5,
    KVL_EUNSUPPORTED = 6, /* this processor does not support it */
    KVL_EDEADLINE = 7,    /* the deadline passed before everything was done */
};

/* A tensor in memory: `run` contiguous bytes in each entry of up to KVL_DIMS dimensions, `sizes`
 * from the outermost to the innermost (1 if unused).
 *
 * With `index`, the outermost dimension is looked up: entry i of it is
 *   index[i] / index_split * strides[0] + index[i] % index_split * index_stride.
 * Block ids have index_split 1. A slot mapping has index_split = slots in a block, strides[0] =
 * from block to block, index_stride = from slot to slot. */
typedef struct kvl_view {
    void *base; /* only [base, base + extent) is accessed */
    uint64_t extent;
    int64_t offset; /* of the first byte, from base */
    uint64_t run;
    uint64_t sizes[KVL_DIMS];
    int64_t strides[KVL_DIMS]; /* in bytes */
    const int64_t *index;      /* sizes[0] entries, or NULL */
    uint64_t index_limit;      /* every entry must be below it */
    uint64_t index_split;
    int64_t index_stride;
} kvl_view;

/* A tensor in the payload, and the position of its first digest in `digests` (KVL_NO_DIGEST: none).
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

/* A tensor of a payload: `start` counts from the end of the header; the eight digits of its digest
 * are at byte `digest` of the layout's `after` (KVL_NO_DIGEST: none, as without bytes). `dtype` is
 * a DLDataType, its code in the lowest byte, then its bits, then its lanes. */
typedef struct kvl_piece {
    uint64_t start;
    uint64_t nbytes;
    uint64_t digest;
    uint64_t dtype;
    uint64_t rank;
    const int64_t *sizes;
} kvl_piece;

/* What the headers of one layout have in common: the text before the request id, in which the eight
 * digits of the header's CRC are zeros, and the text after it, in which those of the digests are.
 */
typedef struct kvl_layout {
    const char *before;
    uint64_t before_nbytes;
    uint64_t crc; /* where its digits are */
    const char *after;
    uint64_t after_nbytes;
    uint64_t digests; /* where the list of digests is */
    uint64_t digests_nbytes;
    const kvl_piece *pieces; /* in the order of their addresses */
    uint64_t count;
} kvl_layout;

#define KVL_MAX_ID 1024
#define KVL_MAX_TENSORS 256

/* Describe an object, a tensor of a caller's framework, as the DLTensor at `tensor`; return 0, or
 * another number if that is not possible. It is `dltensor_from_py_object_no_sync` of a DLPack
 * exchange API: whoever passes it holds what it needs, as Python's GIL. */
typedef int (*kvl_describe)(void *object, void *tensor);

enum kvl_stores {
    KVL_STORES_AUTO = 0,   /* by size */
    KVL_STORES_CACHED = 1, /* through the cache: the reader finds the bytes there */
    KVL_STORES_STREAM = 2, /* past the cache: the overwritten memory is not read first */
};

/* After KVL_EDEADLINE a part of the targets and digests is written, and no thread writes to them
 * any more. */
typedef struct kvl_options {
    uint64_t threads; /* 0: chosen by size and by the number of idle cores */
    uint64_t stores;
    uint64_t deadline; /* nanoseconds of CLOCK_MONOTONIC, looked at every few MiB; 0: none */
} kvl_options;

/* On an error, the copy concerned and its chunk; the number of threads used. */
typedef struct kvl_report {
    uint64_t copy;
    uint64_t chunk;
    uint64_t threads;
} kvl_report;

/* KVL_ABI of the library. */
KVL_API int kvl_version(void);

/* The instruction set in use: "avx512+clmul", "avx512", "avx2", "neon" or "portable". */
KVL_API const char *kvl_features(void);

/* Select one by name, or the best with "auto"; not while copies are in progress. */
KVL_API int kvl_select(const char *features);

/* The text of the calling thread's last error. */
KVL_API const char *kvl_last_error(void);

/* The CRC-32C of `nbytes` bytes, continued from that of the bytes before them (0: none). */
KVL_API uint32_t kvl_crc32c(uint32_t crc, const void *data, uint64_t nbytes);

/* Copy views into the payload. Spans ascend without overlap; digests are written. */
KVL_API int kvl_gather(void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                       uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

/* Copy `length` contiguous bytes to byte `start` of the payload; for small tensors, since the
 * caller packs no structs. Return their CRC-32C, 0 without `digest`, or the negative status. With
 * `digest`, more than KVL_CHUNK bytes are refused. */
KVL_API int64_t kvl_gather_dense(void *payload, uint64_t nbytes, uint64_t start, const void *source,
                                 uint64_t length, int digest);

/* Put a payload together: its header, and the tensors behind it, with zeros between. `sources` are
 * the addresses of the layout's tensors, each contiguous; `quoted_id` is the request id as the
 * header has it. A header of `header_nbytes` that is longer than its text ends with spaces. */
KVL_API int kvl_pack(void *payload, uint64_t nbytes, uint64_t header_nbytes,
                     const kvl_layout *layout, const char *quoted_id, uint64_t quoted_id_nbytes,
                     const void *const *sources);

/* Do what `kvl_pack` does with the layout's tensors as objects that `describe` knows, and with the
 * request id as it is. KVL_EUNSUPPORTED, and nothing is written, unless all are contiguous tensors
 * on the host, of the layout's dtypes and sizes, and the request id is one that `kvl_match` finds;
 * also for more than KVL_MAX_TENSORS tensors. */
KVL_API int kvl_pack_tensors(void *payload, uint64_t nbytes, uint64_t header_nbytes,
                             const kvl_layout *layout, const char *id, uint64_t id_nbytes,
                             void *const *objects, kvl_describe describe);

/* What is needed of the interpreter that has the objects; of CPython Py_IsInitialized,
 * PyGILState_Ensure and PyGILState_Release, Py_IncRef, Py_DecRef and PyList_SetItem. */
typedef struct kvl_interpreter {
    int (*is_initialized)(void);
    int (*lock)(void);
    void (*unlock)(int state);
    void (*keep)(void *object);
    void (*drop)(void *object);
    int (*set_item)(void *list, int64_t index, void *object);
} kvl_interpreter;

/* Set the interpreter of `kvl_make_views`; once, before its first call. */
KVL_API void kvl_set_interpreter(const kvl_interpreter *interpreter);

/* Make an object of the DLManagedTensorVersioned at `tensor`, which it takes; return 0, or another
 * number: `managed_tensor_to_py_object_no_sync` of a DLPack exchange API. */
typedef int (*kvl_make)(void *tensor, void **object);

/* Put views of the layout's tensors, `count` from number `first` on, into a list that is as long.
 * Their bytes are in the `nbytes` at `data`, where the header ends; each keeps `owner`, an object,
 * until it is freed itself, whatever thread does that. The caller holds the interpreter's lock.
 * KVL_EUNSUPPORTED if one cannot be made: the interpreter has the error then, and the list the
 * objects before it. */
KVL_API int kvl_make_views(void *data, uint64_t nbytes, const kvl_layout *layout, uint64_t first,
                           uint64_t count, void *owner, void *list, kvl_make make);

/* Compare a header's text, without its length field, with a layout and with its own CRC. Return the
 * number of characters of its request id; 0 if it is another layout's, is damaged, or has an id of
 * more than KVL_MAX_ID characters, or of others than A to Z, a to z, 0 to 9 and _.:/@+=,- */
KVL_API uint64_t kvl_match(const char *text, uint64_t nbytes, const kvl_layout *layout);

/* Do what `kvl_match` and `kvl_make_views` do with a whole payload, whose header has
 * `header_nbytes`, and make views of all tensors. KVL_EUNSUPPORTED, without an error in the
 * interpreter, if the header is not of this length, layout and request id, which is compared as it
 * is. */
KVL_API int kvl_open(void *payload, uint64_t nbytes, uint64_t header_nbytes,
                     const kvl_layout *layout, const char *id, uint64_t id_nbytes, void *owner,
                     void *list, kvl_make make);

/* Whether a payload's header is as `kvl_pack` writes it for this request id; with `digests`, also
 * whether each tensor is as its digest says. False then for a digest of more than KVL_CHUNK bytes,
 * and for a piece outside the payload. */
KVL_API int kvl_is_packed(const void *payload, uint64_t nbytes, uint64_t header_nbytes,
                          const kvl_layout *layout, const char *quoted_id,
                          uint64_t quoted_id_nbytes, int digests);

/* Copy the payload into views, none of which may contain a byte twice. Digests are compared in the
 * same pass: after KVL_EDIGEST the content of the targets is invalid. */
KVL_API int kvl_scatter(const void *payload, uint64_t nbytes, const kvl_copy *copies,
                        uint64_t count, const uint32_t *digests, uint64_t num_digests,
                        const kvl_options *options, kvl_report *report);

/* Compute the digests of bytes that are in the payload. */
KVL_API int kvl_digest(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
                       uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

/* Compare bytes in the payload with digests; KVL_EDIGEST reports the first that differs. */
KVL_API int kvl_verify(const void *payload, uint64_t nbytes, const kvl_span *spans, uint64_t count,
                       const uint32_t *digests, uint64_t num_digests, const kvl_options *options,
                       kvl_report *report);

#ifdef __cplusplus
}
#endif
#endif
