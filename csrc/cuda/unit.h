// SPDX-License-Identifier: Apache-2.0
// One thread's part of the copying kernel; compiled for the device, and for the host's tests.
#pragma once

#include <cstdint>

#include "../kvlink.h"

#if defined(__CUDACC__)
#define KVLC_BOTH __host__ __device__ __forceinline__
#else
#define KVLC_BOTH inline
#endif
#if defined(__CUDA_ARCH__)
#define KVLC_UNROLL _Pragma("unroll")
#define KVLC_UNROLL_4 _Pragma("unroll 4")
#define KVLC_ROLLED _Pragma("unroll 1")
#else
#define KVLC_UNROLL
#define KVLC_UNROLL_4
#define KVLC_ROLLED
#endif

namespace kvlc {

#if defined(__CUDACC__)
using Wide = uint4;  // the compiler copies it in one instruction
#else
struct alignas(16) Wide {
    uint32_t parts[4];
};
#endif

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;                      // units that a thread has in flight
constexpr uint64_t kTile = kThreads * kAtOnce;  // units that a block moves at a time

// A view and its span of the payload, or a part of both, in elements of `width` bytes that are
// contiguous on both sides. The payload is accessed in units of `unit` bytes: 16, or one element if
// it is not aligned to that.
struct Task {
    char *view, *payload;
    const int64_t *offsets;  // of dimension 0's entries from `view`, or null
    uint64_t elements, width, unit, dims;
    uint64_t first_tile, skipped;  // of the launch; of the view, before the task's own first one
    uint64_t below[KVL_DIMS];      // elements in one entry of the dimension
    int64_t strides[KVL_DIMS];
};

KVLC_BOTH uint64_t tile_nbytes(const Task &task) { return kTile * task.unit; }

KVLC_BOTH char *address_of(const Task &task, uint64_t element) {
    int64_t at = 0;
    KVLC_ROLLED
    for (uint64_t d = 0; d < task.dims; d++) {
        uint64_t entry = element / task.below[d];
        element -= entry * task.below[d];
        at += d == 0 && task.offsets ? task.offsets[entry] : int64_t(entry) * task.strides[d];
    }
    return task.view + at + element * task.width;
}

// Its members are accessed by name alone, never by a reference to one: compilers assume that
// references to two types are different memory.
template <class Element>
union Value {
    static constexpr int kParts = sizeof(Wide) / sizeof(Element);
    Wide wide;
    Element parts[kParts];
};

// Copy between registers and the view, element by element.
template <bool kRead, class Element>
KVLC_BOTH void move_view(const Task &task, uint64_t unit, Value<Element> &value) {
    uint64_t per = task.unit / sizeof(Element), first = unit * per;
    KVLC_UNROLL
    for (int k = 0; k < Value<Element>::kParts; k++)
        if (uint64_t(k) < per && first + k < task.elements) {
            auto element = reinterpret_cast<Element *>(address_of(task, first + k));
            kRead ? value.parts[k] = *element : *element = value.parts[k];
        }
}

// Copy between registers and the payload: 16 bytes at once, except at the end or if unaligned.
template <bool kRead, class Element>
KVLC_BOTH void move_payload(const Task &task, uint64_t unit, Value<Element> &value) {
    uint64_t per = task.unit / sizeof(Element), first = unit * per;
    char *memory = task.payload + unit * task.unit;
    if (task.unit == sizeof(Wide) && first + per <= task.elements) {
        auto wide = reinterpret_cast<Wide *>(memory);
        kRead ? value.wide = *wide : *wide = value.wide;
        return;
    }
    KVLC_UNROLL
    for (int k = 0; k < Value<Element>::kParts; k++)
        if (uint64_t(k) < per && first + k < task.elements) {
            auto element = reinterpret_cast<Element *>(memory) + k;
            kRead ? value.parts[k] = *element : *element = value.parts[k];
        }
}

// Several 16-byte elements are in flight at once; smaller ones are many already. Units beyond the
// end of the task have no elements.
template <bool kGather, class Element>
KVLC_BOTH void move_tile(const Task &task, uint64_t tile, unsigned thread) {
    constexpr int kValues = sizeof(Element) == sizeof(Wide) ? kAtOnce : 1;
    for (int round = 0; round < kAtOnce; round += kValues) {
        Value<Element> value[kValues];
        const uint64_t first = tile * kTile + uint64_t(round) * kThreads + thread;
        KVLC_UNROLL
        for (int i = 0; i < kValues; i++)
            kGather ? move_view<true>(task, first + i * kThreads, value[i])
                    : move_payload<true>(task, first + i * kThreads, value[i]);
        KVLC_UNROLL
        for (int i = 0; i < kValues; i++)
            kGather ? move_payload<false>(task, first + i * kThreads, value[i])
                    : move_view<false>(task, first + i * kThreads, value[i]);
    }
}

// The work of one thread for one tile of all tasks.
template <bool kGather>
KVLC_BOTH void move_tile_of(const Task *tasks, uint64_t count, uint64_t tile, unsigned thread) {
    uint64_t low = 0;  // the last task that begins at or before the tile
    for (uint64_t high = count; high - low > 1;) {
        uint64_t middle = (low + high) / 2;
        (tasks[middle].first_tile <= tile ? low : high) = middle;
    }
    const Task &task = tasks[low];
    tile += task.skipped - task.first_tile;
    switch (task.width) {
        case 16: return move_tile<kGather, Wide>(task, tile, thread);
        case 8: return move_tile<kGather, uint64_t>(task, tile, thread);
        case 4: return move_tile<kGather, uint32_t>(task, tile, thread);
        case 2: return move_tile<kGather, uint16_t>(task, tile, thread);
        default: return move_tile<kGather, uint8_t>(task, tile, thread);
    }
}

}  // namespace kvlc
