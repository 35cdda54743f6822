#include "calibrate.h"

#include <algorithm>
#include <chrono>

#include "transfer.h"

namespace kvlc {
namespace {

constexpr uint64_t kRun = 16 << 10, kRuns = 256, kBytes = kRun * kRuns;
constexpr int kRounds = 3;

// Both sides' memory, and a stream that holds nothing. The memory stays with the device: freeing
// it would wait for all that the device runs.
struct Bench {
    explicit Bench(Device &owner) : device(owner), memory(owner.take_staging(2 * kBytes)) {
        try {
            check(cudaHostGetDevicePointer(&mapped, memory.host, 0), "cudaHostGetDevicePointer");
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        } catch (...) {
            device.give_back(memory);
            throw;
        }
    }
    ~Bench() {
        (void)cudaStreamDestroy(stream);
        device.give_back(memory);
    }
    Bench(const Bench &) = delete;
    Bench &operator=(const Bench &) = delete;

    ptrdiff_t shift() const { return static_cast<char *>(mapped) - memory.host; }

    Device &device;
    Staging memory;
    void *mapped = nullptr;
    cudaStream_t stream = nullptr;
};

// `runs` runs with gaps between.
Plan plan_of(const Bench &bench, bool gather, uint64_t runs, uint64_t crossover) {
    kvl_copy copy{};
    uint64_t run = kBytes / runs;
    copy.view = {bench.memory.device, 2 * kBytes, 0, run, {1, 1, 1, runs}, {0, 0, 0, int64_t(2 * run)},
                 nullptr, 0, 1, 0};
    copy.span = {0, kBytes, KVL_NO_DIGEST};
    Plan plan(gather, bench.memory.host, kBytes);
    plan.add(copy, crossover);
    plan.close();
    return plan;
}

// Seconds from the call to its completion: what enqueueing costs the host counts too.
double seconds(const Bench &bench, const Plan &plan) {
    double best = 1e9;
    for (int round = 0; round <= kRounds; round++) {
        auto start = std::chrono::steady_clock::now();
        Transfer transfer(bench.device, plan, bench.shift(), bench.stream, cudaEventDisableTiming);
        transfer.wait_all();
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (round) best = std::min(best, took.count());  // the first one warms up
    }
    return best;
}

}  // namespace

uint64_t calibrate(Device &device, bool gather) {
    Bench bench(device);
    double kernel = seconds(bench, plan_of(bench, gather, kRuns, UINT64_MAX));
    double in_runs = seconds(bench, plan_of(bench, gather, kRuns, 0));
    double whole = seconds(bench, plan_of(bench, gather, 1, 0));
    return crossover(kernel, in_runs, whole, kRuns, kBytes);
}

}  // namespace kvlc
