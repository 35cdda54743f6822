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

constexpr uint64_t kWorthwhile = 64 << 20;  // bytes; below, a thread's start is no gain
constexpr unsigned kMost = 4;               // more do not make memory faster
constexpr unsigned kSpare = 4;              // idle cores for each thread more: one core alone
                                            // nearly fills the memory of a small machine

// Cores this process may use, less those that are busy at this moment.
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
    if (nbytes < kWorthwhile) return 1;
    return std::min(kMost, 1 + idle_cores() / kSpare);
}

unsigned run_threads(unsigned threads, const std::function<void()> &work) {
    std::vector<std::thread> others;
    others.reserve(threads);
    try {
        while (others.size() + 1 < threads) others.emplace_back(work);
    } catch (const std::system_error &) {
        // The system has no more threads to give: those that run do all the work.
    }
    work();
    for (std::thread &other : others) other.join();
    return static_cast<unsigned>(others.size()) + 1;
}

}  // namespace kvl
