// SPDX-License-Identifier: Apache-2.0
// Measures from which run length copy engines are faster than the kernel on a device.
#pragma once

#include <cstdint>

namespace kvlc {

class Device;

// The crossover of one direction; takes a few milliseconds. The caller is on the device. Throws.
uint64_t calibrate(Device &device, bool gather);

}  // namespace kvlc
