// SPDX-License-Identifier: Apache-2.0
// One call: its copies are checked, cut into chunks, and copied.
#pragma once

#include <atomic>
#include <vector>

#include "chunk.h"
#include "kvlink.h"

namespace kvl {

class Job {
  public:
    // `digests` are read by a comparing job and written by any other.
    Job(Mode mode, bool compare, char *payload, uint64_t nbytes, uint32_t *digests,
        uint64_t num_digests)
        : mode_(mode), compare_(compare), payload_(payload), nbytes_(nbytes), digests_(digests),
          num_digests_(num_digests) {}

    // `given` is null for a scan. Add all copies before `run`.
    void add(const kvl_span &span, const kvl_view *given, uint64_t number);

    // Returns KVL_EDIGEST if a chunk differs, KVL_EDEADLINE if it is not finished; fills the
    // report.
    int run(const kvl_options &options, kvl_report &report);

  private:
    struct Item {
        View view;
        kvl_span span;
        uint64_t number;       // the caller's
        uint64_t first_chunk;  // of all chunks of the job
    };

    void check_span(const kvl_span &span);
    void work(bool stream, uint64_t deadline);
    uint64_t do_chunk(Mover &mover, const Item &item, uint64_t chunk, uint64_t number);

    Mode mode_;
    bool compare_;
    char *payload_;
    uint64_t nbytes_;
    uint32_t *digests_;
    uint64_t num_digests_;
    std::vector<Item> items_;
    uint64_t chunks_ = 0, moved_ = 0, written_ = 0;
    std::atomic<uint64_t> next_{0}, first_mismatch_{UINT64_MAX};
};

}  // namespace kvl
