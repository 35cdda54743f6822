// SPDX-License-Identifier: Apache-2.0
#include "runtime.h"

namespace kvlc {
namespace {

// The driver's own functions, found at run time: nothing is linked to a driver.
struct Driver {
    int (*get_current)(void **context) = nullptr;
    int (*set_current)(void *context) = nullptr;

    Driver() {
        find("cuCtxGetCurrent", reinterpret_cast<void **>(&get_current));
        find("cuCtxSetCurrent", reinterpret_cast<void **>(&set_current));
    }

    static void find(const char *name, void **function) {
#if CUDART_VERSION >= 12050
        cudaDriverEntryPointQueryResult found;
        check(cudaGetDriverEntryPointByVersion(name, function, 12000, 0, &found), name);
#else
        check(cudaGetDriverEntryPoint(name, function, 0), name);
#endif
        if (!*function) kvl::fail(KVLC_ENODEVICE, "the driver has no %s", name);
    }
};

const Driver &driver() {
    static const Driver found;  // retried after a failure
    return found;
}

}  // namespace

void check(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError();  // clear it, so that no later call reports it
    bool none = status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver;
    kvl::fail(none ? KVLC_ENODEVICE : KVLC_ECUDA, "%s: %s (%s)", what, cudaGetErrorString(status),
              cudaGetErrorName(status));
}

OnDevice::OnDevice(uint64_t number) {
    if (driver().get_current(&before_)) before_ = nullptr;
    cudaError_t status = cudaSetDevice(static_cast<int>(number));
    if (status == cudaSuccess) status = cudaThreadExchangeStreamCaptureMode(&mode_);
    if (status != cudaSuccess) (void)driver().set_current(before_);
    check(status, "entering the device");
}

OnDevice::~OnDevice() {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    (void)driver().set_current(before_);
}

}  // namespace kvlc
