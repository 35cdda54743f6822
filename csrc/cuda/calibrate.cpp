// SPDX-License-Identifier: Apache-2.0
#include "calibrate.h"

#include <algorithm>
#include <chrono>

#include "transfer.h"

namespace kvlc {
namespace {

constexpr uint64_t kRun = 16 << 10, kRuns = 256, kBytes = kRun * kRuns;
constexpr int kRounds = 3;

// Memory of both sides, and an empty stream. The memory is kept by the device: freeing it would
// wait for all work of the device.
struct Workspace {
    explicit Workspace(Device &owner) : device(owner), memory(owner.acquire_staging(2 * kBytes)) {
        try {
            stream = device.acquire_stream();
        } catch (...) {
            device.release_staging(memory);
            throw;
        }
    }
    ~Workspace() {
        device.forget(stream);
        device.release_stream(stream);
        device.release_staging(memory);
    }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    Device &device;
    Staging memory;
    cudaStream_t stream = nullptr;
};

// `runs` runs with gaps between them.
Plan plan_of(const Workspace &workspace, bool gather, uint64_t runs, uint64_t crossover) {
    kvl_copy copy{};
    uint64_t run = kBytes / runs;
    copy.view = {workspace.memory.device,     2 * kBytes, 0, run, {1, 1, 1, runs},
                 {0, 0, 0, int64_t(2 * run)}, nullptr,    0, 1,   0};
    copy.span = {0, kBytes, KVL_NO_DIGEST};
    Plan plan(gather, workspace.memory.host, kBytes, kGroup);
    plan.add(copy, crossover);
    plan.close();
    return plan;
}

// Seconds from the call to its completion, the host's cost of enqueueing included.
double seconds(const Workspace &workspace, const Plan &plan) {
    double best = 1e9;
    for (int round = 0; round <= kRounds; round++) {
        auto start = std::chrono::steady_clock::now();
        Transfer transfer(workspace.device, plan, {workspace.stream, nullptr},
                          cudaEventDisableTiming);
        transfer.finish();
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (round) best = std::min(best, took.count());  // the first one is the warm-up
    }
    return best;
}

}  // namespace

uint64_t calibrate(Device &device, bool gather) {
    Workspace workspace(device);
    double kernel = seconds(workspace, plan_of(workspace, gather, kRuns, UINT64_MAX));
    double split = seconds(workspace, plan_of(workspace, gather, kRuns, 0));
    double whole = seconds(workspace, plan_of(workspace, gather, 1, 0));
    return crossover(kernel, split, whole, kRuns, kBytes);
}

}  // namespace kvlc
