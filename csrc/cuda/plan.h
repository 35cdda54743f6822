// SPDX-License-Identifier: Apache-2.0
// One call, checked and laid out before anything is enqueued; independent of CUDA.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "../view.h"
#include "unit.h"

namespace kvlc {

constexpr uint64_t kGroup = 8 << 20;  // bytes that complete together, as the host can observe

// Bytes that are contiguous on both sides: one copy of a copy engine.
struct Run {
    char *view, *payload;
    uint64_t nbytes;
};

// Copies that are enqueued together and complete together.
struct Group {
    uint64_t stop;  // the first copy after it
    size_t first_task, stop_task, first_run, stop_run;
    uint64_t tiles;  // of its tasks
};

class Plan {
  public:
    Plan(bool gather, char *payload, uint64_t nbytes)
        : gather_(gather), payload_(payload), nbytes_(nbytes) {}

    // Views whose runs are shorter than `crossover` on average become tasks, others runs.
    // Throws kvl::Failure. Add all copies and call `close` before anything is enqueued.
    void add(const kvl_copy &copy, uint64_t crossover);
    void close() { end_group(); }

    bool gather() const { return gather_; }
    uint64_t copies() const { return copies_; }
    const std::vector<Task> &tasks() const { return tasks_; }  // `offsets` is not yet an address
    const std::vector<int64_t> &offsets() const { return offsets_; }
    const std::vector<Run> &runs() const { return runs_; }
    const std::vector<Group> &groups() const { return groups_; }

    // The tables for the device: the tasks, then the offsets.
    size_t staged_nbytes() const;
    // Write them to `host`; they will be copied to `device`, and the payload's device address is
    // `shift` bytes from its host address.
    void stage(char *host, const char *device, ptrdiff_t shift) const;

  private:
    void check_span(const kvl_span &span);
    void add_task(const kvl::View &view, const kvl_span &span);
    void add_runs(const kvl::View &view, const kvl_span &span);
    int64_t offsets_of(const kvl::View &view);
    void end_group();

    bool gather_;
    char *payload_;
    uint64_t nbytes_;
    std::vector<Task> tasks_;
    std::vector<int64_t> first_offset_;  // of each task, or -1
    std::vector<int64_t> offsets_;
    std::vector<Run> runs_;
    std::vector<Group> groups_;
    // Layers share a table: it is computed and sent once.
    std::map<std::tuple<const int64_t *, size_t, ptrdiff_t, uint64_t, ptrdiff_t>, int64_t>
        known_indices_;
    uint64_t copies_ = 0, written_ = 0, open_nbytes_ = 0, open_tiles_ = 0;
    size_t open_task_ = 0, open_run_ = 0;
};

// The run length from which a copy engine is faster, by three durations for `nbytes` bytes: of the
// kernel, of a copy engine for `runs` runs, and of a copy engine for one run.
uint64_t crossover(double kernel, double split, double whole, uint64_t runs, uint64_t nbytes);

}  // namespace kvlc
