// SPDX-License-Identifier: Apache-2.0
// One call, checked and laid out before anything is enqueued; independent of CUDA.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "../view.h"
#include "digests.h"
#include "unit.h"

namespace kvlc {

constexpr uint64_t kGroup = 16 << 20;     // bytes that are packed together: ten calls of CUDA
constexpr uint64_t kRunGroup = 32 << 20;  // bytes of one call of copy engines, which then pause

// What a task is of its call: bytes of the payload, and where they are in packed memory.
struct Piece {
    uint64_t start, nbytes, packed_at;
    int64_t first_offset;          // in `offsets`, or -1
    size_t first_span, stop_span;  // of the digests'
};

// Bytes that are contiguous on both sides: one copy of a copy engine.
struct Run {
    char *view, *payload;
    uint64_t nbytes;
};

// Bytes that are enqueued together; a long view is in several.
struct Group {
    size_t first_task, stop_task, first_run, stop_run, first_span, stop_span;
    uint64_t tiles;   // of its tasks
    uint64_t nbytes;  // of the payload
};

// Where each table begins in the memory that is sent to the device.
struct Tables {
    size_t tasks, offsets, spans, registers, done, nbytes;
};

class Plan {
  public:
    // `group`: bytes, after which one ends that packs; `on_device`: where the payload is.
    Plan(bool gather, char *payload, uint64_t nbytes, uint64_t group, bool on_device = false)
        : gather_(gather), on_device_(on_device), payload_(payload), nbytes_(nbytes),
          group_(group) {}

    // Views whose runs are shorter than `crossover` on average become tasks, others runs.
    // Digests are of what is in device memory: a payload there, or views and what is packed, or a
    // payload that is written directly. They are numbered from 0, in order.
    // Throws kvl::Failure. Add all copies and call `close` before anything is enqueued.
    void add(const kvl_copy &copy, uint64_t crossover);
    void close() { end_group(); }

    bool gather() const { return gather_; }
    bool on_device() const { return on_device_; }
    char *payload() const { return payload_; }
    // `payload` is the host's address, and `offsets` none yet.
    const std::vector<Task> &tasks() const { return tasks_; }
    const std::vector<Piece> &pieces() const { return pieces_; }  // one for each task
    const std::vector<int64_t> &offsets() const { return offsets_; }
    const std::vector<Run> &runs() const { return runs_; }
    const std::vector<Group> &groups() const { return groups_; }
    const Digests &digests() const { return digests_; }

    // The tables for the device; behind them the digests' registers, and a count of what is done.
    Tables tables() const;
    // Write them to `host`; they will be copied to `device`. The kernel finds the tasks' payload at
    // `payloads`, one address for each task.
    void stage(char *host, const char *device, const std::vector<char *> &payloads) const;

    // A task's payload where the kernel finds that of the call `shift` bytes from the host's
    // address, or the packed bytes of its group at `packed`.
    char *mapped(size_t task, ptrdiff_t shift) const { return tasks_[task].payload + shift; }
    char *packed(size_t task, char *packed) const;
    // The runs between the packed bytes of a group and the payload, and its other runs.
    std::vector<Run> packed_runs(const Group &group, char *packed) const;

  private:
    void check_span(const kvl_span &span);
    void add_task(const kvl::View &view, const kvl_span &span);
    void add_runs(const kvl::View &view, const kvl_span &span);
    void add_digests(const kvl_span &span, const char *start, uint64_t position, uint64_t nbytes);
    int64_t offsets_of(const kvl::View &view);
    void end_group();

    bool gather_, on_device_;
    char *payload_;
    uint64_t nbytes_, group_;
    std::vector<Task> tasks_;
    std::vector<Piece> pieces_;
    std::vector<int64_t> offsets_;
    std::vector<Run> runs_;
    std::vector<Group> groups_;
    Digests digests_;
    // Layers share a table: it is computed and sent once.
    std::map<std::tuple<const int64_t *, size_t, ptrdiff_t, uint64_t, ptrdiff_t>, int64_t>
        known_indices_;
    uint64_t written_ = 0, open_nbytes_ = 0, open_packed_ = 0, open_tiles_ = 0;
    size_t open_task_ = 0, open_run_ = 0, open_span_ = 0;
};

// The run length from which a copy engine is faster, by three durations for `nbytes` bytes: of the
// kernel, of a copy engine for `runs` runs, and of a copy engine for one run.
uint64_t crossover(double kernel, double split, double whole, uint64_t runs, uint64_t nbytes);

}  // namespace kvlc
