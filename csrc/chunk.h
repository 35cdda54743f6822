// SPDX-License-Identifier: Apache-2.0
// One digest chunk, the unit of work: up to a MiB of the payload, copied by four lanes.
#pragma once

#include "kernel.h"
#include "steps.h"
#include "view.h"

namespace kvl {

class Cursor;

// Gather: from a view; scatter: into a view; scan: digests only.
enum class Mode { gather, scatter, scan };

struct Chunk {
    const View *view;  // null for a scan
    size_t position;   // of its first byte in the view
    char *payload;
    size_t nbytes;
};

// Copies chunks; one object for each thread. Call `fence` before other threads read the bytes.
class Mover {
  public:
    Mover(Mode mode, bool stream) : mode_(mode), stream_(stream), kernel_(kernel()) {}

    // Returns the chunk's CRC-32C; an undefined number without `digest`.
    uint32_t move(const Chunk &chunk, bool digest);
    void fence() { kernel_.fence(); }

  private:
    uint32_t move_part(Chunk &left, size_t n, size_t unit, uint32_t crc, bool digest);
    void lanes(const Chunk &chunk, size_t lane_nbytes, uint32_t *crcs, bool digest);
    size_t copy_rows(Cursor *cursors, const View &view, size_t rows, char *const *payload,
                     uint32_t *crcs, bool digest);
    size_t copy_loose_rows(Cursor *cursors, const View &view, size_t rows, char *const *payload,
                           uint32_t *crcs, bool digest);
    size_t copy_piece(Cursor *cursors, size_t left, char *const *payload, uint32_t *crcs,
                      bool digest);
    void copy(Dst dst, Src src, uint32_t *crcs, bool digest, bool aligned, Src next);
    uint32_t rest(const Chunk &chunk, size_t done, uint32_t crc, bool digest);
    uint32_t join(const uint32_t *crcs, size_t lane_nbytes);

    Mode mode_;
    bool stream_;
    const Kernel &kernel_;
    Steps steps_, loose_;
    size_t shift_nbytes_ = 0;  // that shift_ was computed for; most chunks have the same size
    uint32_t shift_ = 0;
};

}  // namespace kvl
