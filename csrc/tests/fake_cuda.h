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
    int capturing_elsewhere = 0;  // another thread captures a graph in the global mode
    bool event_fails = false;     // recording one
    bool wait_fails = false;      // blocking until one
    uint64_t launches = 0, batched = 0, copied = 0;  // copied: by single calls
    int streams = 0;                                 // created
    int unregistered = 0, unregistered_late = 0;     // late: the memory was unmapped already
    int readonly = 0;                                // registrations of that kind
    int blocking = 0;        // calls that may block, by threads that were told not to make any
    int off_device = 0;      // calls that would open a context on device 0
    int eager = 0;           // waiting runs all streams first: 1 in one order, 2 in the other one
    int held = 0;            // events are reached once it is 0; such threads do not wait for that
    int refuses_memory = 0;  // of the device
    uint64_t device_nbytes = 0;   // allocated, and not freed
    uint64_t crossed_nbytes = 0;  // copied between the host and the device, either way
};

FakeCuda &fake_cuda();
// Enqueue anything on a stream; null is the caller's default one.
void fake_enqueue(cudaStream_t stream, std::function<void()> work);
// Run all work of a stream.
void fake_run(cudaStream_t stream);
// Whether the calling thread is on any device.
bool fake_has_context();
// Whether the calling thread may make calls that another thread's capture forbids.
bool fake_is_relaxed();
// The int fields, in this order, for tests in Python.
extern "C" int *fake_cuda_field(int number);
// `device_nbytes` and `crossed_nbytes`.
extern "C" uint64_t fake_cuda_nbytes(int number);
extern "C" void fake_cuda_call(uint64_t stream, void (*work)());
extern "C" void fake_cuda_run(uint64_t stream);
// Count the calls of this thread that may block, from now on or no more.
extern "C" void fake_cuda_forbid_blocking(int forbidden);
