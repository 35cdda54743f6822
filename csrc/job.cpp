// SPDX-License-Identifier: Apache-2.0
#include "job.h"

#include <time.h>

#include <algorithm>

#include "failure.h"
#include "threads.h"

namespace kvl {
namespace {

using ull = unsigned long long;

// Above this many bytes stores go past the cache, which they would only evict.
constexpr uint64_t kStream = 8 << 20;

// A thread looks at the clock when it has moved so many bytes since: a fraction of a millisecond.
constexpr uint64_t kLook = 4 << 20;

bool is_past(uint64_t deadline) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000 + uint64_t(now.tv_nsec) >= deadline;
}

}  // namespace

void Job::check_span(const kvl_span &span) {
    if (span.nbytes > nbytes_ || span.start > nbytes_ - span.nbytes)
        fail(KVL_EBOUNDS, "a span of %llu bytes at %llu in a payload of %llu", ull(span.nbytes),
             ull(span.start), ull(nbytes_));
    uint64_t chunks = (span.nbytes + KVL_CHUNK - 1) / KVL_CHUNK;
    if (span.first_digest != KVL_NO_DIGEST &&
        (chunks > num_digests_ || span.first_digest > num_digests_ - chunks))
        fail(KVL_EBOUNDS, "digests %llu to %llu of %llu", ull(span.first_digest),
             ull(span.first_digest + chunks), ull(num_digests_));
    if (mode_ == Mode::gather) {
        if (span.start < written_)
            fail(KVL_EOVERLAP, "a span at %llu after one that ends at %llu", ull(span.start),
                 ull(written_));
        written_ = span.start + span.nbytes;
    }
}

void Job::add(const kvl_span &span, const kvl_view *given, uint64_t number) {
    check_span(span);
    if (!span.nbytes) return;
    Item item{{}, span, number, chunks_};
    if (given) {
        item.view = check_view(*given, span.nbytes, mode_ == Mode::scatter);
        const char *start = payload_ + span.start;
        if (item.view.low < start + span.nbytes && start < item.view.high)
            fail(KVL_EOVERLAP, "the view and its span of the payload are the same memory");
    }
    items_.push_back(item);
    chunks_ += (span.nbytes + KVL_CHUNK - 1) / KVL_CHUNK;
    moved_ += span.nbytes;
}

int Job::run(const kvl_options &options, kvl_report &report) {
    if (options.stores > KVL_STORES_STREAM || options.threads > 1024)
        fail(KVL_EARGUMENT, "stores %llu, threads %llu", ull(options.stores), ull(options.threads));
    uint64_t threads = options.threads ? options.threads : choose_threads(moved_);
    threads = std::max<uint64_t>(1, std::min(threads, chunks_));
    bool stream = options.stores == KVL_STORES_STREAM ||
                  (options.stores == KVL_STORES_AUTO && moved_ > kStream);
    report.threads =
        run_threads(static_cast<unsigned>(threads), [&] { work(stream, options.deadline); });

    uint64_t mismatch = first_mismatch_.load();
    if (mismatch == UINT64_MAX) return next_.load() < chunks_ ? KVL_EDEADLINE : KVL_OK;
    auto after = [](uint64_t chunk, const Item &item) { return chunk < item.first_chunk; };
    auto item = std::upper_bound(items_.begin(), items_.end(), mismatch, after) - 1;
    report.chunk = mismatch - item->first_chunk;
    report.copy = item->number;
    return KVL_EDIGEST;
}

// Threads claim chunks one by one, in order: a preempted thread delays one chunk.
void Job::work(bool stream, uint64_t deadline) {
    Mover mover(mode_, stream);
    size_t item = 0;
    for (uint64_t moved = 0;;) {
        if (deadline && moved >= kLook) {
            if (is_past(deadline)) break;
            moved = 0;
        }
        uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
        if (number >= chunks_) break;
        while (item + 1 < items_.size() && items_[item + 1].first_chunk <= number) item++;
        moved += do_chunk(mover, items_[item], number - items_[item].first_chunk, number);
    }
    mover.fence();
}

// Returns the number of bytes read.
uint64_t Job::do_chunk(Mover &mover, const Item &item, uint64_t chunk, uint64_t number) {
    const kvl_span &span = item.span;
    uint64_t position = chunk * KVL_CHUNK;
    bool digest = span.first_digest != KVL_NO_DIGEST;
    if (mode_ == Mode::scan && !digest) return 0;
    size_t size = std::min<uint64_t>(KVL_CHUNK, span.nbytes - position);
    uint32_t crc =
        mover.move({&item.view, position, payload_ + span.start + position, size}, digest);
    if (!digest) return size;
    uint32_t &stored = digests_[span.first_digest + chunk];
    if (!compare_) {
        stored = crc;
    } else if (stored != crc) {
        uint64_t first = first_mismatch_.load(std::memory_order_relaxed);
        while (number < first && !first_mismatch_.compare_exchange_weak(first, number)) {}
    }
    return size;
}

}  // namespace kvl
