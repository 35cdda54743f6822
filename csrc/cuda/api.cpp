// SPDX-License-Identifier: Apache-2.0
// The C interface: exceptions become a status and the thread's last error.
#include <cstdio>
#include <memory>
#include <new>
#include <unordered_map>

#include "memory.h"
#include "pinned.h"
#include "recorded.h"
#include "transfer.h"

namespace kvlc {
namespace {

using ull = unsigned long long;

thread_local char last_error[384];

template <class Body>
int guarded(Body body) {
    try {
        body();
        return KVL_OK;
    } catch (const kvl::Failure &failure) {
        snprintf(last_error, sizeof last_error, "%s", failure.text);
        return failure.status;
    } catch (...) {
        snprintf(last_error, sizeof last_error, "the system refused memory or another resource");
        return KVL_ENOMEM;
    }
}

// The last of its users deletes it, in any thread.
struct OpenTicket {
    std::unique_ptr<Pending> pending;

    explicit OpenTicket(std::unique_ptr<Pending> work) : pending(std::move(work)) {}
    ~OpenTicket() {
        try {
            OnDevice on_device(number());
            pending.reset();
        } catch (const kvl::Failure &) {
            // the device is lost: nothing of it is in progress
        }
    }
    uint64_t number() const { return pending->device().number(); }
};

std::mutex lock;
// Never destroyed: at the end of the process CUDA may be unloaded first.
auto &tickets = *new std::unordered_map<uint64_t, std::shared_ptr<OpenTicket>>;
uint64_t last_ticket = 0;

cudaStream_t stream_of(uint64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

std::shared_ptr<OpenTicket> find(uint64_t ticket, bool erase = false) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = tickets.find(ticket);
    if (found == tickets.end()) kvl::fail(KVL_EARGUMENT, "no ticket %llu", ull(ticket));
    std::shared_ptr<OpenTicket> opened = found->second;
    if (erase) tickets.erase(found);
    return opened;
}

uint64_t add_ticket(std::unique_ptr<Pending> pending) {
    auto opened = std::make_shared<OpenTicket>(std::move(pending));
    std::lock_guard<std::mutex> guard(lock);
    tickets[++last_ticket] = std::move(opened);
    return last_ticket;
}

const Recorded &recorded_of(const OpenTicket &opened, uint64_t ticket, uint64_t device) {
    auto recorded = dynamic_cast<const Recorded *>(opened.pending.get());
    if (!recorded || opened.number() != device)
        kvl::fail(KVL_EARGUMENT, "ticket %llu is not of kvlc_record on device %llu", ull(ticket),
                  ull(device));
    return *recorded;
}

Plan plan_of(bool gather, char *payload, uint64_t nbytes, bool on_device, const kvl_copy *copies,
             uint64_t count, uint64_t crossover, kvl_report &current) {
    Plan plan(gather, payload, nbytes, kGroup, on_device);
    for (; current.copy < count; current.copy++) {
        try {
            plan.add(copies[current.copy], crossover);
        } catch (kvl::Failure &failure) {
            kvl::fail(failure.status, "copy %llu: %s", ull(current.copy), failure.text);
        }
    }
    current.copy = 0;
    plan.close();
    return plan;
}

int begin(bool gather, char *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
          const kvlc_options *options, kvl_report *report, uint64_t *ticket) {
    kvl_report own{};
    kvl_report &current = report ? *report : own;
    current = kvl_report{};
    return guarded([&] {
        if (!options || !ticket || (!payload && nbytes) || (!copies && count))
            kvl::fail(KVL_EARGUMENT, "a null pointer where there must be none");
        const bool is_there = is_allocated(payload, nbytes, options->device);
        uint64_t crossover = options->crossover;
        if (crossover == KVLC_MEASURED && !is_there)
            crossover = Device::known_crossover(options->device, gather);
        auto plan_by = [&](uint64_t bytes) {
            return plan_of(gather, payload, nbytes, is_there, copies, count, bytes, current);
        };
        // First, so that wrong arguments are refused without a device, too.
        Plan plan = plan_by(crossover);
        Device &device = Device::get(options->device);
        OnDevice on_device(options->device);
        // Within a device the kernel copies everything: it reads and writes both sides fast.
        if (crossover == KVLC_MEASURED && !is_there) plan = plan_by(device.crossover(gather));
        if (!is_there && !plan.groups().empty()) check_registered(payload, nbytes, gather);
        Predecessor before{stream_of(options->stream), nullptr};
        std::shared_ptr<OpenTicket> after;
        if (options->after) {
            after = find(options->after);
            const Recorded &found = recorded_of(*after, options->after, options->device);
            before = {found.stream(), &found};
        }
        *ticket = add_ticket(std::make_unique<Transfer>(device, plan, before));
    });
}

}  // namespace
}  // namespace kvlc

using namespace kvlc;

int kvlc_version(void) { return KVLC_ABI; }

const char *kvlc_last_error(void) { return last_error; }

int kvlc_devices(uint64_t *count) {
    return guarded([&] { *count = count_devices(); });
}

int kvlc_describe(uint64_t device, char *text, uint64_t nbytes) {
    return guarded([&] {
        cudaDeviceProp found;
        check(cudaGetDeviceProperties(&found, static_cast<int>(device)), "no such device");
        snprintf(text, nbytes, "cuda %d.%d, %s", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
                 found.name);
    });
}

int kvlc_register(uint64_t device, void *address, uint64_t nbytes, uint64_t readonly) {
    return guarded(
        [&] { register_memory(device, static_cast<char *>(address), nbytes, readonly); });
}

int kvlc_unregister(void *address) {
    return guarded([&] { unregister_memory(static_cast<char *>(address)); });
}

int kvlc_allocate(uint64_t device, uint64_t nbytes, void **address) {
    return guarded([&] { *address = allocate_memory(device, nbytes); });
}

int kvlc_free(void *address) {
    return guarded([&] { free_memory(static_cast<char *>(address)); });
}

int kvlc_read(uint64_t device, const void *from, void *to, uint64_t nbytes) {
    return guarded([&] {
        Device &found = Device::get(device);
        OnDevice on_device(device);
        read_memory(found, static_cast<const char *>(from), static_cast<char *>(to), nbytes);
    });
}

int kvlc_write(uint64_t device, void *to, const void *from, uint64_t nbytes) {
    return guarded([&] {
        Device &found = Device::get(device);
        OnDevice on_device(device);
        write_memory(found, static_cast<char *>(to), static_cast<const char *>(from), nbytes);
    });
}

int kvlc_digest(uint64_t device, const kvlc_bytes *spans, uint64_t count, uint32_t *crcs) {
    return guarded([&] {
        Device &found = Device::get(device);
        OnDevice on_device(device);
        digest_memory(found, spans, count, crcs);
    });
}

int kvlc_gather(void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                const kvlc_options *options, kvl_report *report, uint64_t *ticket) {
    return begin(true, static_cast<char *>(payload), nbytes, copies, count, options, report,
                 ticket);
}

int kvlc_scatter(const void *payload, uint64_t nbytes, const kvl_copy *copies, uint64_t count,
                 const kvlc_options *options, kvl_report *report, uint64_t *ticket) {
    // Only read: `begin` knows the direction.
    return begin(false, static_cast<char *>(const_cast<void *>(payload)), nbytes, copies, count,
                 options, report, ticket);
}

int kvlc_record(uint64_t device, uint64_t stream, uint64_t *ticket) {
    return guarded([&] {
        Device &found = Device::get(device);
        OnDevice on_device(device);
        *ticket = add_ticket(std::make_unique<Recorded>(found, stream_of(stream)));
    });
}

int kvlc_stream_wait(uint64_t ticket, uint64_t stream) {
    return guarded([&] {
        std::shared_ptr<OpenTicket> opened = find(ticket);
        OnDevice on_device(opened->number());
        refuse_capture(stream_of(stream));
        opened->pending->hold_back(stream_of(stream));
    });
}

int kvlc_wait(uint64_t ticket) {
    return guarded([&] {
        std::shared_ptr<OpenTicket> opened = find(ticket);
        OnDevice on_device(opened->number());
        opened->pending->wait();
    });
}

int kvlc_poll(uint64_t ticket, uint64_t *complete) {
    return guarded([&] {
        std::shared_ptr<OpenTicket> opened = find(ticket);
        OnDevice on_device(opened->number());
        *complete = opened->pending->is_complete();
    });
}

int kvlc_digests(uint64_t ticket, uint32_t *crcs, uint64_t count) {
    return guarded([&] {
        std::shared_ptr<OpenTicket> opened = find(ticket);
        OnDevice on_device(opened->number());
        opened->pending->digests(crcs, count);
    });
}

int kvlc_finish(uint64_t ticket) {
    return guarded([&] {
        std::shared_ptr<OpenTicket> opened = find(ticket, true);
        OnDevice on_device(opened->number());
        opened->pending->finish();
    });
}

int kvlc_crossover(uint64_t device, uint64_t *bytes) {
    return guarded([&] {
        Device &found = Device::get(device);
        OnDevice on_device(device);
        for (bool gather : {true, false}) bytes[!gather] = found.crossover(gather);
    });
}
