// SPDX-License-Identifier: Apache-2.0
#include "chunk.h"

#include <algorithm>
#include <numeric>

#include "bytes.h"
#include "crc32c.h"
#include "cursor.h"

namespace kvl {
namespace {

// Pieces of at least this size are copied directly; shorter ones through a stage that stays in the
// first-level cache.
constexpr size_t kDirect = 256;
constexpr size_t kStage = 2048;
// Pieces up to this size, such as a pool's blocks: the processor's prefetchers restart at each, and
// know nothing of the next one. In longer pieces they do better alone.
constexpr size_t kPiece = 64 << 10;
// Rows up to this size are copied many in one call of the kernel.
constexpr size_t kRow = 2048;
// All lanes begin at a piece, or at an entry of up to this size: they end together then.
constexpr size_t kUnit = 32 << 10;
// Rows that are no whole lines pass a stage, so many at once that they are: about kLooseStage
// bytes, and up to kLoose.
constexpr size_t kLoose = 16 << 10;
constexpr size_t kLooseStage = 4352;
// On the way into a view the source is contiguous: shorter pieces gain nothing there.
constexpr size_t kPage = 4096;

bool aligned(char *const *lanes) {
    uintptr_t bits = 0;
    for (int lane = 0; lane < kLanes; lane++) bits |= reinterpret_cast<uintptr_t>(lanes[lane]);
    return bits % kLine == 0;
}

// Whether a lane's stores are near its own or another lane's loads.
bool is_near(Dst dst, Src src, ptrdiff_t further, uint32_t most) {
    bool near = false;
    for (int lane = 0; lane < kLanes; lane++)
        for (int other = 0; other < kLanes; other++) {
            auto to = uint32_t(reinterpret_cast<uintptr_t>(dst[lane]));
            auto from = uint32_t(reinterpret_cast<uintptr_t>(src[other]));
            near |= (to + uint32_t(further) - from - 1) % uint32_t(kPage) < most;
        }
    return near;
}

// Whole entries of a dimension that are whole lines, in bytes; 0 if there is no use for them.
size_t unit_of(const View &view, int dimension) {
    const size_t entry = view.below[dimension], unit = entry * (kLine / std::gcd(entry, kLine));
    return view.run >= kLine && unit <= (entry % kLine ? kLoose : kUnit) ? unit : 0;
}

size_t shortest(const Cursor *cursors, size_t n) {
    for (int lane = 0; lane < kLanes; lane++) n = std::min(n, cursors[lane].left);
    return n;
}

}  // namespace

uint32_t Mover::move(const Chunk &chunk, bool digest) {
    uint32_t crc = kCrcStart;
    Chunk left = chunk;
    for (int d = 0; chunk.view && d < chunk.view->dims; d++) {
        const size_t unit = unit_of(*chunk.view, d);
        if (!unit || left.nbytes < kLanes * unit) continue;
        size_t head = (unit - left.position % unit) % unit;
        crc = move_part(left, head, kLine, crc, digest);
        crc = move_part(left, left.nbytes / (kLanes * unit) * (kLanes * unit), unit, crc, digest);
    }
    return ~move_part(left, left.nbytes, kLine, crc, digest);
}

// Copy the first n bytes of what is left, in lanes of a multiple of `unit` and what these leave
// over; return the CRC continued over them.
uint32_t Mover::move_part(Chunk &left, size_t n, size_t unit, uint32_t crc, bool digest) {
    const Chunk part{left.view, left.position, left.payload, n};
    uint32_t crcs[kLanes] = {crc};
    size_t lane_nbytes = n / kLanes / unit * unit;
    if (lane_nbytes) lanes(part, lane_nbytes, crcs, digest);
    left = {left.view, left.position + n, left.payload + n, left.nbytes - n};
    return rest(part, lane_nbytes * kLanes, digest ? join(crcs, lane_nbytes) : 0, digest);
}

// Copy four equal parts of the chunk in parallel lanes.
void Mover::lanes(const Chunk &chunk, size_t lane_nbytes, uint32_t *crcs, bool digest) {
    if (mode_ == Mode::scan) {
        const char *payload[kLanes];
        for (int lane = 0; lane < kLanes; lane++)
            payload[lane] = chunk.payload + lane * lane_nbytes;
        return kernel_.digest(payload, lane_nbytes, crcs);
    }
    Cursor cursors[kLanes];
    for (int lane = 0; lane < kLanes; lane++)
        cursors[lane].seek(*chunk.view, chunk.position + lane * lane_nbytes);
    const size_t run = chunk.view->run;
    const int dims = chunk.view->dims;
    const size_t unit = dims ? unit_of(*chunk.view, dims - 1) : 0;
    const bool loose = unit > run;
    // Rows at once: at most so many, and a multiple of so many.
    const size_t least = unit ? unit / run : 1;
    size_t most = unit && run <= kRow ? Steps::kMost : 0;
    if (loose) most = std::max(least, std::min(most, kLooseStage / run) / least * least);

    for (size_t done = 0; done < lane_nbytes;) {
        char *payload[kLanes];
        for (int lane = 0; lane < kLanes; lane++)
            payload[lane] = chunk.payload + lane * lane_nbytes + done;
        size_t rows = std::min(most, (lane_nbytes - done) / run);
        for (int lane = 0; rows > 1 && lane < kLanes; lane++) rows = cursors[lane].rows(rows);
        rows = rows / least * least;
        if (rows > 1)
            done += loose ? copy_loose_rows(cursors, *chunk.view, rows, payload, crcs, digest)
                          : copy_rows(cursors, *chunk.view, rows, payload, crcs, digest);
        else
            done += copy_piece(cursors, lane_nbytes - done, payload, crcs, digest);
    }
}

// Rows that share lines of the payload: a gather fills these in a stage, so that they are written
// whole and in order; a scatter reads the lines for the CRC just before.
size_t Mover::copy_loose_rows(Cursor *cursors, const View &view, size_t rows, char *const *payload,
                              uint32_t *crcs, bool digest) {
    alignas(kLine) char stages[kLanes][kLoose];
    const bool into_view = mode_ == Mode::scatter;
    char *here[kLanes], *flat[kLanes];
    const char *next[kLanes];
    const size_t n = rows * view.run;
    for (int lane = 0; lane < kLanes; lane++) {
        here[lane] = cursors[lane].at;
        cursors[lane].skip(rows);
        next[lane] = cursors[lane].at ? cursors[lane].at : here[lane];
        flat[lane] = into_view ? payload[lane] : stages[lane];
    }
    loose_.plan_rows(view, rows, false, Order::memory);
    if (into_view && digest) kernel_.digest(payload, n, crcs);
    for (const Step *step = loose_.begin(); step < loose_.begin() + rows; step++)
        for (int lane = 0; lane < kLanes; lane++) {
            const char *ahead = (step->behind ? next : here)[lane] + step->ahead;
            for (size_t at = 0; at < view.run; at += kLine) __builtin_prefetch(ahead + at);
            __builtin_prefetch(ahead + view.run - 1);
            char *row = here[lane] + step->from, *line = flat[lane] + step->to;
            into_view ? copy_bytes(row, line, view.run) : copy_bytes(line, row, view.run);
        }
    if (into_view) return n;
    steps_.plan_piece(n);
    copy(payload, flat, crcs, digest, aligned(payload), nullptr);
    return n;
}

// Copy so many rows in each lane; return their bytes.
size_t Mover::copy_rows(Cursor *cursors, const View &view, size_t rows, char *const *payload,
                        uint32_t *crcs, bool digest) {
    const bool into_view = mode_ == Mode::scatter;
    char *here[kLanes];
    const char *next[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
        here[lane] = cursors[lane].at;
        cursors[lane].skip(rows);
        next[lane] = cursors[lane].at ? cursors[lane].at : here[lane];
    }
    steps_.plan_rows(view, rows, into_view,
                     kernel_.jumps && !into_view ? Order::inner : Order::payload);
    Dst dst = into_view ? here : payload, src = into_view ? payload : here;
    copy(dst, src, crcs, digest, aligned(dst), into_view ? nullptr : next);
    return rows * view.run;
}

// Copy a piece of the view in each lane, or through a stage what is shorter; return its bytes.
size_t Mover::copy_piece(Cursor *cursors, size_t left, char *const *payload, uint32_t *crcs,
                         bool digest) {
    const bool into_view = mode_ == Mode::scatter;
    alignas(kLine) char stages[kLanes][kStage];
    size_t n = shortest(cursors, left);
    const size_t run = cursors->run();
    const bool direct = n >= (run % kLine ? kRow : kDirect) || n == left;
    n = direct ? n / kLine * kLine : std::min(left, kStage);
    bool staged[kLanes];
    char *view[kLanes];
    for (int lane = 0; lane < kLanes; lane++) {
        Cursor &cursor = cursors[lane];
        staged[lane] = cursor.left < n;
        view[lane] = staged[lane] ? stages[lane] : cursor.at;
        if (staged[lane] && !into_view) cursor.move<false>(stages[lane], n);
    }
    Dst dst = into_view ? view : payload, src = into_view ? payload : view;
    const bool ahead = direct && n >= (into_view ? kPage : kDirect) && n <= kPiece;
    const char *next[kLanes];
    for (int lane = 0; ahead && lane < kLanes; lane++)
        next[lane] = into_view || staged[lane] ? src[lane] + n : cursors[lane].behind(n);
    steps_.plan_piece(n);
    copy(dst, src, crcs, digest, (direct || !into_view) && aligned(dst), ahead ? next : nullptr);
    for (int lane = 0; lane < kLanes; lane++) {
        if (!staged[lane])
            cursors[lane].advance(n);
        else if (into_view)
            cursors[lane].move<true>(stages[lane], n);
    }
    return n;
}

// Copy what is planned in all lanes.
void Mover::copy(Dst dst, Src src, uint32_t *crcs, bool digest, bool aligned, Src next) {
    bool stream = stream_ && aligned && steps_.are_lines();
    auto kernel = digest ? (stream ? kernel_.stream_digest : kernel_.copy_digest)
                         : (stream ? kernel_.stream : kernel_.copy);
    bool near = steps_.are_even() &&
                is_near(dst, src, steps_.begin()->to - steps_.begin()->from, kernel_.near);
    kernel(dst, src, steps_.begin(), steps_.count(), crcs, next, near);
}

// Copy what four lanes of whole cache lines leave over: less than five lines.
uint32_t Mover::rest(const Chunk &chunk, size_t done, uint32_t crc, bool digest) {
    size_t n = chunk.nbytes - done;
    if (!n) return crc;
    if (mode_ != Mode::scan) {
        Cursor cursor;
        cursor.seek(*chunk.view, chunk.position + done);
        if (mode_ == Mode::gather)
            cursor.move<false>(chunk.payload + done, n);
        else
            cursor.move<true>(chunk.payload + done, n);
    }
    return digest ? kernel_.crc(crc, chunk.payload + done, n) : crc;
}

uint32_t Mover::join(const uint32_t *crcs, size_t lane_nbytes) {
    if (!lane_nbytes) return crcs[0];
    if (shift_nbytes_ != lane_nbytes) shift_ = crc_shift(shift_nbytes_ = lane_nbytes);
    uint32_t crc = crcs[0];
    for (int lane = 1; lane < kLanes; lane++) crc = crc_multiply(shift_, crc) ^ crcs[lane];
    return crc;
}

}  // namespace kvl
