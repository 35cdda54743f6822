// SPDX-License-Identifier: Apache-2.0
#include "threads.h"

#include <algorithm>
#include <cstdio>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

namespace kvl {
namespace {

constexpr uint64_t kMinBytes = 64 << 20;  // below, starting a thread costs more than it gains
constexpr unsigned kMaxThreads = 4;       // more threads do not make memory faster
// Idle cores for each additional thread: on a small machine one core nearly saturates memory.
constexpr unsigned kCoresPerThread = 4;

// Cores that this process may use, less those that are busy now.
unsigned idle_cores() {
#if defined(__linux__)
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores)) return 0;
    unsigned running = 0;
    FILE *file = fopen("/proc/loadavg", "re");
    if (!file) return 0;
    bool read = fscanf(file, "%*s %*s %*s %u/", &running) == 1;
    fclose(file);
    unsigned all = static_cast<unsigned>(CPU_COUNT(&cores));
    return read && all > running ? all - running : 0;
#else
    return 0;
#endif
}

}  // namespace

unsigned choose_threads(uint64_t nbytes) {
    if (nbytes < kMinBytes) return 1;
    return std::min(kMaxThreads, 1 + idle_cores() / kCoresPerThread);
}

unsigned run_threads(unsigned threads, const std::function<void()> &work) {
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        while (others.size() + 1 < threads) others.emplace_back(work);
    } catch (const std::system_error &) {
        // The system refuses more threads: the running ones do all the work.
    }
    work();
    for (std::thread &other : others) other.join();
    return static_cast<unsigned>(others.size()) + 1;
}

}  // namespace kvl
