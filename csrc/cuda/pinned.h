// Registered host memory: page-locked, and mapped into every device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlc {

// See kvlc_register and kvlc_unregister; these throw.
void register_memory(uint64_t device, char *address, uint64_t nbytes, bool readonly);
void unregister_memory(char *address);

// How far from the host's address the current device finds these bytes. Throws if they do not
// lie in one registered span, or are readonly and to be written.
ptrdiff_t device_shift(const char *address, uint64_t nbytes, bool writing);

}  // namespace kvlc
