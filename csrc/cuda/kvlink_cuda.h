// SPDX-License-Identifier: Apache-2.0
/* The C interface of omni_kvlink's CUDA part: copies between device views and payloads in
 * registered host memory or in device memory of its own, and digests of device memory.
 *
 * It takes the copies of `kvlink.h`; in them `base` is a device address and `index` a host one.
 * Every argument is checked, index entries included, before anything is enqueued. Work goes to
 * streams of the library's own, after the work that the caller's stream holds at the call, or held
 * at a kvlc_record; no call waits for a whole device. Statuses are those of `kvl_status` and
 * `kvlc_status`. Any thread may call, also while another one captures a CUDA graph.
 */
#ifndef KVLINK_CUDA_H
#define KVLINK_CUDA_H

#include "../kvlink.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented with every change of a struct or a function below, or of kvl_copy. */
#define KVLC_ABI 4
#define KVLC_MEASURED UINT64_MAX

enum kvlc_status {
    KVLC_ENODEVICE = 16, /* no driver, or no device that it can use */
    KVLC_ECUDA = 17,     /* CUDA refused or failed; its message is in the last error */
    KVLC_EPAGEABLE = 18, /* host memory that is not registered, or cannot be */
};

typedef struct kvlc_options {
    uint64_t device;
    uint64_t stream;    /* the caller's cudaStream_t, on that device */
    uint64_t after;     /* a ticket of kvlc_record on that device, in place of `stream`; or 0 */
    uint64_t crossover; /* views whose contiguous runs are shorter on average are copied by a
                           kernel, others by copy engines; in bytes, or KVLC_MEASURED */
} kvlc_options;

/* Bytes of device memory. */
typedef struct kvlc_bytes {
    const void *address;
    uint64_t nbytes;
} kvlc_bytes;

/* KVLC_ABI of the library. */
KVL_API int kvlc_version(void);

/* The text of the calling thread's last error. */
KVL_API const char *kvlc_last_error(void);

/* The number of devices; KVLC_ENODEVICE if there are none. */
KVL_API int kvlc_devices(uint64_t *count);

/* CUDA's version and the device's name, cut to `nbytes` with the final 0. */
KVL_API int kvlc_describe(uint64_t device, char *text, uint64_t nbytes);

/* Page-lock host memory and map it into every device. The same span again does nothing. A
 * span that overlaps another one: KVL_EOVERLAP. Refused by the system: KVLC_EPAGEABLE. `readonly`
 * memory can only be scattered from. */
KVL_API int kvlc_register(uint64_t device, void *address, uint64_t nbytes, uint64_t readonly);

/* Undo it: before the memory is unmapped, after its last ticket; KVL_EARGUMENT if unknown. */
KVL_API int kvlc_unregister(void *address);

/* Allocate device memory for payloads; KVLC_ECUDA if there is not enough. It may wait for the
 * device, and so may kvlc_free: KVL_EARGUMENT if unknown. */
KVL_API int kvlc_allocate(uint64_t device, uint64_t nbytes, void **address);
KVL_API int kvlc_free(void *address);

/* Copy a few bytes from device memory into any memory of the host, or back; blocks for that, and
 * waits for no work that was enqueued elsewhere. Nor does kvlc_digest, which computes the CRC-32C
 * of each span of a device's memory, on the device. */
KVL_API int kvlc_read(uint64_t device, const void *from, void *to, uint64_t nbytes);
KVL_API int kvlc_write(uint64_t device, void *to, const void *from, uint64_t nbytes);
KVL_API int kvlc_digest(uint64_t device, const kvlc_bytes *spans, uint64_t count, uint32_t *crcs);

/* Copy device views into the payload, which is in registered memory or from kvlc_allocate. Spans
 * ascend without overlap. The views may change after kvlc_finish. Here and below digests are
 * numbered from 0, in the order of the spans, and kvlc_digests returns them. */
KVL_API int kvlc_gather(void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                        const kvlc_options *options, kvl_report *report, uint64_t *ticket);

/* Copy the payload into device views, none of which may contain a byte twice. Later work on the
 * caller's stream waits for it, but with `after` none does (kvlc_stream_wait); the payload may
 * change after kvlc_finish. */
KVL_API int kvlc_scatter(const void *payload, uint64_t nbytes, const kvl_copy *copies,
                         uint64_t count, const kvlc_options *options, kvl_report *report,
                         uint64_t *ticket);

/* Record what a stream holds now: a ticket that is complete when that work is. */
KVL_API int kvlc_record(uint64_t device, uint64_t stream, uint64_t *ticket);

/* Make later work on a stream of the ticket's device wait for all its copies; does not block. */
KVL_API int kvlc_stream_wait(uint64_t ticket, uint64_t stream);

/* Block until all copies of the ticket are complete. Any thread, several at once. */
KVL_API int kvlc_wait(uint64_t ticket);

/* Whether they are: 1, or 0. */
KVL_API int kvlc_poll(uint64_t ticket, uint64_t *complete);

/* Block until they are, and write the `count` digests of the call: CRC-32C, computed by the device
 * from the bytes as they are in its memory, a view's or what was packed. KVL_EARGUMENT if the call
 * had another number of them. */
KVL_API int kvlc_digests(uint64_t ticket, uint32_t *crcs, uint64_t count);

/* Block until all copies are complete and delete the ticket; one of kvlc_record does not block. */
KVL_API int kvlc_finish(uint64_t ticket);

/* The crossover measured for a device: bytes[0] of gathering, bytes[1] of scattering. */
KVL_API int kvlc_crossover(uint64_t device, uint64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
