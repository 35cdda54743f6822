// SPDX-License-Identifier: Apache-2.0
// As much of CUDA's runtime as the library uses, for tests without a device. What is enqueued is
// done when an event behind it is waited for, and no sooner.
#pragma once

#include <cstddef>

// Declarations of other versions are for a check that the sources compile with them.
#ifndef CUDART_VERSION
#define CUDART_VERSION 13000
#endif

using cudaStream_t = struct FakeStream *;
using cudaEvent_t = struct FakeEvent *;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInsufficientDriver = 35,
    cudaErrorCallRequiresNewerDriver = 36,
    cudaErrorNoDevice = 100,
    cudaErrorNotReady = 600,
    cudaErrorHostMemoryAlreadyRegistered = 712,
    cudaErrorLaunchFailure = 719,
    cudaErrorNotSupported = 801,
    cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrHostRegisterReadOnlySupported = 113,
};
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum {
    cudaHostRegisterPortable = 1,
    cudaHostRegisterMapped = 2,
    cudaHostRegisterReadOnly = 8,
};
struct cudaDeviceProp {
    char name[256];
};

cudaError_t cudaGetLastError();
const char *cudaGetErrorString(cudaError_t status);
const char *cudaGetErrorName(cudaError_t status);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int device);
#if CUDART_VERSION >= 12050
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *found);
#elif CUDART_VERSION >= 12000
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0 };
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *found = nullptr);
#else
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags);
#endif
cudaError_t cudaMalloc(void **memory, size_t nbytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t nbytes);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaHostRegister(void *memory, size_t nbytes, unsigned flags);
cudaError_t cudaHostUnregister(void *memory);
cudaError_t cudaHostGetDevicePointer(void **found, void *memory, unsigned flags);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *state);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
#if CUDART_VERSION >= 12080
enum { cudaMemcpySrcAccessOrderStream = 1, cudaMemcpyFlagPreferOverlapWithCompute = 1 };
struct cudaMemcpyAttributes {
    int srcAccessOrder;
    unsigned flags;
};
#endif
#if CUDART_VERSION >= 13000
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *sizes,
                                 size_t count, cudaMemcpyAttributes *how, size_t *first,
                                 size_t attributes, cudaStream_t stream);
#elif CUDART_VERSION >= 12080
cudaError_t cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count,
                                 cudaMemcpyAttributes *how, size_t *first, size_t attributes,
                                 size_t *failed, cudaStream_t stream);
#endif
