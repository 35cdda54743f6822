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
#define KVLC_ROLLED _Pragma("unroll 1")
#else
#define KVLC_UNROLL
#define KVLC_ROLLED
#endif

namespace kvlc {

#if defined(__CUDACC__)
using Wide = uint4;  // the compiler moves it in one instruction
#else
struct alignas(16) Wide {
    uint32_t words[4];
};
#endif

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // units that a thread has in flight
constexpr uint64_t kTile = kThreads * kAtOnce;  // units that a block moves at a time

// A view and its place in the payload, in elements of `width` bytes that lie in one piece on both
// sides. The payload is touched in units of `unit` bytes: 16, or one element where it is not
// aligned to that.
struct Task {
    char *view, *payload;
    const int64_t *offsets;  // of dimension 0's entries from `view`, or null
    uint64_t elements, width, unit, dims, first_tile;
    uint64_t below[KVL_DIMS];  // elements in one entry of the dimension
    int64_t strides[KVL_DIMS];
};

KVLC_BOTH uint64_t units(const Task &task) {
    return (task.elements * task.width + task.unit - 1) / task.unit;
}

KVLC_BOTH char *place(const Task &task, uint64_t element) {
    int64_t at = 0;
    KVLC_ROLLED
    for (uint64_t d = 0; d < task.dims; d++) {
        uint64_t entry = element / task.below[d];
        element -= entry * task.below[d];
        at += d == 0 && task.offsets ? task.offsets[entry] : int64_t(entry) * task.strides[d];
    }
    return task.view + at + element * task.width;
}

template <class Element>
union Held {
    static constexpr int kParts = sizeof(Wide) / sizeof(Element);
    Wide wide;
    Element parts[kParts];
};

template <class Element>
KVLC_BOTH void move_part(bool into_held, Element &part, char *memory) {
    if (into_held)
        part = *reinterpret_cast<const Element *>(memory);
    else
        *reinterpret_cast<Element *>(memory) = part;
}

// Between a register and the view: element by element, wherever they lie.
template <bool kRead, class Element>
KVLC_BOTH void move_view(const Task &task, uint64_t unit, Held<Element> &held) {
    uint64_t per = task.unit / sizeof(Element), first = unit * per;
    KVLC_UNROLL
    for (int k = 0; k < Held<Element>::kParts; k++)
        if (uint64_t(k) < per && first + k < task.elements)
            move_part(kRead, held.parts[k], place(task, first + k));
}

// Between a register and the payload: 16 bytes at once, but for an unaligned payload and the end.
template <bool kRead, class Element>
KVLC_BOTH void move_payload(const Task &task, uint64_t unit, Held<Element> &held) {
    uint64_t per = task.unit / sizeof(Element), first = unit * per;
    char *memory = task.payload + unit * task.unit;
    if (task.unit == sizeof(Wide) && first + per <= task.elements)
        return move_part(kRead, held.wide, memory);
    KVLC_UNROLL
    for (int k = 0; k < Held<Element>::kParts; k++)
        if (uint64_t(k) < per && first + k < task.elements)
            move_part(kRead, held.parts[k], memory + k * sizeof(Element));
}

// Several whole elements are in flight at once; smaller ones are many already. Units beyond the
// task's end have no elements, and nothing is done for them.
template <bool kGather, class Element>
KVLC_BOTH void move_tile(const Task &task, uint64_t tile, unsigned thread) {
    constexpr int kHeld = sizeof(Element) == sizeof(Wide) ? kAtOnce : 1;
    for (int round = 0; round < kAtOnce; round += kHeld) {
        Held<Element> held[kHeld];
        const uint64_t first = tile * kTile + uint64_t(round) * kThreads + thread;
        KVLC_UNROLL
        for (int i = 0; i < kHeld; i++)
            kGather ? move_view<true>(task, first + i * kThreads, held[i])
                    : move_payload<true>(task, first + i * kThreads, held[i]);
        KVLC_UNROLL
        for (int i = 0; i < kHeld; i++)
            kGather ? move_payload<false>(task, first + i * kThreads, held[i])
                    : move_view<false>(task, first + i * kThreads, held[i]);
    }
}

// What thread `thread` does for tile `tile` of all tasks.
template <bool kGather>
KVLC_BOTH void move_tile_of(const Task *tasks, uint64_t count, uint64_t tile, unsigned thread) {
    uint64_t low = 0;  // the last task that begins at or before the tile
    for (uint64_t high = count; high - low > 1;) {
        uint64_t middle = (low + high) / 2;
        (tasks[middle].first_tile <= tile ? low : high) = middle;
    }
    const Task &task = tasks[low];
    tile -= task.first_tile;
    switch (task.width) {
        case 16: return move_tile<kGather, Wide>(task, tile, thread);
        case 8: return move_tile<kGather, uint64_t>(task, tile, thread);
        case 4: return move_tile<kGather, uint32_t>(task, tile, thread);
        case 2: return move_tile<kGather, uint16_t>(task, tile, thread);
        default: return move_tile<kGather, uint8_t>(task, tile, thread);
    }
}

}  // namespace kvlc
