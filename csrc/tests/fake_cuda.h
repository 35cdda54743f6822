// SPDX-License-Identifier: Apache-2.0
// The fake device's settings and counters, for tests.
#pragma once

#include <cstdint>
#include <functional>

#include "fake_cuda/cuda_runtime_api.h"

struct FakeCuda {
    int devices = 1;
    int refuses_registration = 0, fails_after = -1;  // fails_after: number of launches and copies
    bool readonly_supported = true, has_batch = true, capturing = false;
    uint64_t launches = 0, batched = 0, copied = 0;  // copied: by single calls
    int unregistered = 0, unregistered_late = 0;     // late: the memory was unmapped already
    int readonly = 0;                                // registrations of that kind
    int held = 0;  // threads wait for events until it is 0; a watched one does not
    int waits = 0, allocated = 0;  // by watched threads: events waited for, bytes allocated
    int pageable = 0;              // copies to or from host memory that is not page-locked
};

FakeCuda &fake_cuda();
// Enqueue anything on a stream; null is the caller's default one.
void fake_enqueue(cudaStream_t stream, std::function<void()> work);
// Run all work of a stream.
void fake_run(cudaStream_t stream);
// Whether the calling thread is on any device.
bool fake_has_context();
// The int fields, in this order, for tests in Python.
extern "C" int *fake_cuda_field(int number);

// Streams for tests in Python; any number is a stream of the caller's.
extern "C" {
void *fake_cuda_record(cudaStream_t stream);  // an event, to be given to fake_cuda_forget
void fake_cuda_forget(void *event);
void fake_cuda_follow(cudaStream_t stream, void *event);
int fake_cuda_reached(void *event);
void fake_cuda_wait(void *event);
void fake_cuda_write(void *to, const void *from, size_t nbytes, cudaStream_t stream);
void fake_cuda_release(void);     // what was held goes on
void fake_cuda_watch(int begin);  // the calling thread
}
