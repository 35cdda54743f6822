// Which of the two ways of copying is the faster one, found out on this device.
#pragma once

#include <cstdint>

namespace kvlc {

class Device;

// The crossover of one direction: a few milliseconds, on memory of its own. The caller is on the
// device. Throws.
uint64_t calibrate(Device &device, bool gather);

}  // namespace kvlc
