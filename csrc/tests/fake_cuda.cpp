// SPDX-License-Identifier: Apache-2.0
#include "fake_cuda.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../cuda/kernel.h"

// A stream is a queue; a thread that waits for a position runs the queue up to there.
struct FakeStream {
    std::deque<std::function<void()>> queue;
    uint64_t enqueued = 0, done = 0;
    int device = 0;
};

namespace {

struct Position {  // in a stream; a stream that waits for it keeps it alive
    std::shared_ptr<FakeStream> stream;
    uint64_t at = 0;
};

std::recursive_mutex lock;
std::map<cudaStream_t, std::shared_ptr<FakeStream>> streams;
std::map<char *, size_t> registered, page_locked;
struct DeviceMemory {
    size_t nbytes = 0;
    int device = 0;
};
std::map<const char *, DeviceMemory> allocated;
thread_local void *context = nullptr;  // the current one: a device's number plus 1
thread_local bool must_not_block = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

int current_device() { return context ? int(reinterpret_cast<uintptr_t>(context)) - 1 : 0; }

// Whether the caller is on the device of a stream that was created here.
bool here(cudaStream_t stream) {
    auto found = streams.find(stream);
    return found == streams.end() || found->second->device < 0 ||
           found->second->device == current_device();
}

std::shared_ptr<FakeStream> &of(cudaStream_t stream) {
    auto &found = streams[stream];
    if (!found) {
        found = std::make_shared<FakeStream>();
        found->device = -1;  // the caller's own stream, on any device
    }
    return found;
}

void run(const Position &position) {
    while (position.stream && position.stream->done < position.at) {
        auto work = std::move(position.stream->queue.front());
        position.stream->queue.pop_front();
        work();
        position.stream->done++;
    }
}

// Each stream to its end, as far ahead of the others as the events allow.
void run_all(bool reversed) {
    std::vector<Position> ends;
    for (auto &[handle, stream] : streams) ends.push_back({stream, stream->enqueued});
    if (reversed) std::reverse(ends.begin(), ends.end());
    for (const Position &end : ends) run(end);
}

// The device's memory that an address lies in, or null; views count as the device's, unlisted.
const DeviceMemory *memory_at(const void *address) {
    auto at = static_cast<const char *>(address);
    auto after = allocated.upper_bound(at);
    if (after == allocated.begin()) return nullptr;
    auto found = std::prev(after);
    return at < found->first + found->second.nbytes ? &found->second : nullptr;
}

bool is_page_locked(const void *address) {
    auto at = static_cast<char *>(const_cast<void *>(address));
    for (const auto *memory : {&registered, &page_locked}) {
        auto after = memory->upper_bound(at);
        if (after != memory->begin() && at < std::prev(after)->first + std::prev(after)->second)
            return true;
    }
    return false;
}

void count_crossing(uint64_t nbytes) { fake_cuda().crossed_nbytes += nbytes; }

// A task's bytes, which end where the next one begins, or all tiles.
uint64_t task_nbytes(const kvlc::Task &task, uint64_t stop_tile) {
    uint64_t tile = kvlc::tile_nbytes(task), whole = task.elements * task.width;
    return std::min((stop_tile - task.first_tile) * tile, whole - task.skipped * tile);
}

cudaError_t push(cudaStream_t stream, std::function<void()> work) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!here(stream)) return cudaErrorInvalidValue;
    int &left = fake_cuda().fails_after;
    if (left == 0) return cudaErrorLaunchFailure;
    if (left > 0) left--;
    of(stream)->queue.push_back(std::move(work));
    of(stream)->enqueued++;
    return cudaSuccess;
}

// As CUDA answers calls that could disturb another thread's capture.
cudaError_t unsafe() {
    std::lock_guard<std::recursive_mutex> hold(lock);
    fake_cuda().off_device += !context;
    bool forbidden =
        fake_cuda().capturing_elsewhere && capture_mode != cudaStreamCaptureModeRelaxed;
    return forbidden ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

void blocks() {
    std::lock_guard<std::recursive_mutex> hold(lock);
    fake_cuda().blocking += must_not_block;
}

void wait_until_released() {
    volatile int &held = fake_cuda().held;
    while (held && !must_not_block) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

cudaError_t allocate(void **memory, size_t nbytes) {
    blocks();
    if (cudaError_t status = unsafe()) return status;
    *memory = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
    return *memory ? cudaSuccess : cudaErrorInvalidValue;
}

int current_context(void **found) {
    *found = context;
    return 0;
}
int set_context(void *chosen) {
    context = chosen;
    return 0;
}

}  // namespace

struct FakeEvent {
    Position position;
};

FakeCuda &fake_cuda() {
    static FakeCuda state;
    return state;
}

int *fake_cuda_field(int number) {
    FakeCuda &fake = fake_cuda();
    int *fields[] = {&fake.devices,       &fake.refuses_registration, &fake.fails_after,
                     &fake.unregistered,  &fake.unregistered_late,    &fake.readonly,
                     &fake.blocking,      &fake.capturing_elsewhere,  &fake.held,
                     &fake.refuses_memory};
    return fields[number];
}

uint64_t fake_cuda_nbytes(int number) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    return number ? fake_cuda().crossed_nbytes : fake_cuda().device_nbytes;
}

void fake_enqueue(cudaStream_t stream, std::function<void()> work) {
    (void)push(stream, std::move(work));
}

void fake_run(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    run({of(stream), of(stream)->enqueued});
}

bool fake_has_context() { return context != nullptr; }

bool fake_is_relaxed() { return capture_mode == cudaStreamCaptureModeRelaxed; }

void fake_cuda_call(uint64_t stream, void (*work)()) {
    fake_enqueue(reinterpret_cast<cudaStream_t>(stream), work);
}

void fake_cuda_run(uint64_t stream) { fake_run(reinterpret_cast<cudaStream_t>(stream)); }

void fake_cuda_forbid_blocking(int forbidden) { must_not_block = forbidden != 0; }

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char *cudaGetErrorString(cudaError_t) { return "a fake error"; }
const char *cudaGetErrorName(cudaError_t status) {
    return status == cudaErrorNoDevice ? "cudaErrorNoDevice" : "cudaErrorFake";
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = fake_cuda().devices;
    return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaSetDevice(int device) {
    if (device >= fake_cuda().devices) return cudaErrorInvalidValue;
    context = reinterpret_cast<void *>(uintptr_t(device) + 1);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? 40 : fake_cuda().readonly_supported;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    strcpy(found->name, "Fake");
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
    *function = strstr(name, "Get") ? reinterpret_cast<void *>(current_context)
                                    : reinterpret_cast<void *>(set_context);
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t nbytes) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (fake_cuda().refuses_memory) return cudaErrorInvalidValue;
    if (cudaError_t status = allocate(memory, nbytes)) return status;
    allocated[static_cast<char *>(*memory)] = {nbytes, current_device()};
    fake_cuda().device_nbytes += nbytes;
    return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    blocks();
    if (cudaError_t status = unsafe()) return status;
    auto found = allocated.find(static_cast<char *>(memory));
    if (found == allocated.end() || found->second.device != current_device())
        return cudaErrorInvalidValue;
    fake_cuda().device_nbytes -= found->second.nbytes;
    allocated.erase(found);
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **memory, size_t nbytes) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    cudaError_t status = allocate(memory, nbytes);
    if (status == cudaSuccess) page_locked[static_cast<char *>(*memory)] = nbytes;
    return status;
}
cudaError_t cudaFreeHost(void *memory) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    page_locked.erase(static_cast<char *>(memory));
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *memory, size_t nbytes, unsigned flags) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    blocks();
    if (cudaError_t status = unsafe()) return status;
    if (fake_cuda().refuses_registration) return cudaErrorNotSupported;
    fake_cuda().readonly += (flags & cudaHostRegisterReadOnly) != 0;
    bool fresh = registered.try_emplace(static_cast<char *>(memory), nbytes).second;
    return fresh ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void *memory) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (cudaError_t status = unsafe()) return status;
    auto page = reinterpret_cast<uintptr_t>(memory) / 4096 * 4096;
    if (msync(reinterpret_cast<void *>(page), 1, MS_ASYNC)) fake_cuda().unregistered_late++;
    fake_cuda().unregistered++;
    return registered.erase(static_cast<char *>(memory)) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaHostGetDevicePointer(void **found, void *memory, unsigned) {
    *found = memory;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (cudaError_t status = unsafe()) return status;
    auto made = std::make_shared<FakeStream>();
    made->device = current_device();
    fake_cuda().streams++;
    *stream = made.get();
    streams[*stream] = made;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    fake_run(stream);
    streams.erase(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    blocks();
    if (cudaError_t status = unsafe()) return status;
    fake_run(stream);
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    std::swap(*mode, capture_mode);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *state) {
    *state = fake_cuda().capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    Position position = event->position;
    of(stream)->queue.push_back([position] { run(position); });
    of(stream)->enqueued++;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    if (cudaError_t status = unsafe()) return status;
    *event = new FakeEvent;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!here(stream) || fake_cuda().event_fails) return cudaErrorInvalidValue;
    event->position = {of(stream), of(stream)->enqueued};
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    wait_until_released();
    std::lock_guard<std::recursive_mutex> hold(lock);
    blocks();
    if (cudaError_t status = unsafe()) return status;
    if (fake_cuda().wait_fails) return cudaErrorLaunchFailure;
    if (fake_cuda().eager) run_all(fake_cuda().eager == 2);
    run(event->position);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (cudaError_t status = unsafe()) return status;
    const Position &position = event->position;
    return position.stream && position.stream->done < position.at ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    fake_cuda().copied++;
    return push(stream, [=] {
        if (kind != cudaMemcpyDeviceToDevice) count_crossing(nbytes);
        memcpy(to, from, nbytes);
    });
}
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                                 size_t count, cudaMemcpyAttributes *how, size_t *first,
                                 size_t attributes, cudaStream_t stream) {
    if (!fake_cuda().has_batch) return cudaErrorCallRequiresNewerDriver;
    if (!count || attributes != 1 || *first || how->srcAccessOrder != 1)
        return cudaErrorInvalidValue;
    std::lock_guard<std::recursive_mutex> hold(lock);
    fake_cuda().batched += count;
    for (size_t i = count; i--;) {  // in reverse: callers may not rely on an order
        void *there = to[i];
        const void *here = from[i];
        size_t nbytes = sizes[i];
        cudaError_t status = push(stream, [=] {
            if (is_page_locked(there) || is_page_locked(here)) count_crossing(nbytes);
            memcpy(there, here, nbytes);
        });
        if (status) return status;
    }
    return cudaSuccess;
}

namespace kvlc {

cudaError_t launch(bool gather, const Task *tasks, uint64_t count, uint64_t tiles, unsigned blocks,
                   cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const DeviceMemory *memory = memory_at(tasks);
    if (!blocks || blocks > tiles || !memory || memory->device != current_device())
        return cudaErrorInvalidValue;
    fake_cuda().launches++;
    return push(stream, [=] {
        for (uint64_t i = 0; i < count; i++) {
            const Task &task = tasks[i];
            if (!memory_at(task.payload + task.skipped * tile_nbytes(task)))
                count_crossing(task_nbytes(task, i + 1 < count ? tasks[i + 1].first_tile : tiles));
        }
        for (uint64_t tile = 0; tile < tiles; tile++)
            for (unsigned thread = 0; thread < kThreads; thread++)
                gather ? move_tile_of<true>(tasks, count, tile, thread)
                       : move_tile_of<false>(tasks, count, tile, thread);
    });
}

cudaError_t launch_digest(const DigestCall &call, uint64_t count, uint64_t first, uint64_t stop,
                          unsigned blocks, cudaStream_t stream) {
    std::lock_guard<std::recursive_mutex> hold(lock);
    const DeviceMemory *memory = memory_at(call.spans), *tables = memory_at(call.tables);
    if (!blocks || blocks > stop - first || stop > call.pieces || !memory ||
        memory->device != current_device() || memory_at(call.registers) != memory ||
        memory_at(call.done) != memory || !is_page_locked(call.results) || !tables ||
        tables->device != current_device())
        return cudaErrorInvalidValue;
    return push(stream, [=] {
        for (uint64_t piece = first; piece < stop; piece++) {
            const CrcSpan &span = span_of(call.spans, count, piece);
            for (unsigned thread = 0; thread < kThreads; thread++)
                call.registers[span.chunk] ^=
                    crc_product(crc_piece(span, piece, *call.tables, thread),
                                crc_shift(span, piece, *call.tables));
        }
        *call.done += uint32_t(stop - first);
        if (*call.done == call.pieces)
            std::copy(call.registers, call.registers + call.chunks, call.results);
    });
}

cudaError_t load_kernels() { return cudaSuccess; }

}  // namespace kvlc
