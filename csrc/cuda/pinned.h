// SPDX-License-Identifier: Apache-2.0
// Registered host memory: page-locked, and mapped into every device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlc {

// See kvlc_register and kvlc_unregister; these throw.
void register_memory(uint64_t device, char *address, uint64_t nbytes, bool readonly);
void unregister_memory(char *address);

// Throws if the bytes are not in one registered span, or are readonly and `writing`.
void check_registered(const char *address, uint64_t nbytes, bool writing);
// Offset from a registered host address to the current device's address of the same byte. Throws.
ptrdiff_t device_shift(const char *address);

}  // namespace kvlc
