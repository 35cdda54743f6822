// SPDX-License-Identifier: Apache-2.0
// Choosing the number of threads, and running them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvl {

// By size and by idle cores; one thread for what takes a core a few milliseconds.
unsigned choose_threads(uint64_t nbytes);

// Run `work` in this thread and in up to `threads - 1` more; returns how many ran.
// `work` must be complete if only this thread ran it, and must not throw.
unsigned run_threads(unsigned threads, const std::function<void()> &work);

}  // namespace kvl
