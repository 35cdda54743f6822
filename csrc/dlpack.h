// SPDX-License-Identifier: Apache-2.0
// The part of DLPack 1.x (https://dmlc.github.io/dlpack/latest/c_api.html) that is read here.
#pragma once

#include <cstdint>

namespace kvl {

// A DLTensor.
struct DenseTensor {
    void *data;
    int32_t device_type, device_id;
    int32_t rank;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *sizes;
    int64_t *strides;  // in elements; before DLPack 1.2 perhaps NULL: contiguous
    uint64_t byte_offset;
};

constexpr int32_t kHost = 1;  // kDLCPU

// A DLManagedTensorVersioned. Who takes it calls `deleter`, once, in any thread.
struct ManagedTensor {
    uint32_t major, minor;
    void *context;
    void (*deleter)(ManagedTensor *);
    uint64_t flags;
    DenseTensor tensor;
};

}  // namespace kvl
