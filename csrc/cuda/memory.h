// SPDX-License-Identifier: Apache-2.0
// Device memory in which payloads lie: allocating it, and what is done with it at once.
#pragma once

#include "device.h"

namespace kvlc {

// See kvlc_allocate and kvlc_free; these throw.
char *allocate_memory(uint64_t device, uint64_t nbytes);
void free_memory(char *address);

// Whether the bytes are in one allocation; throws if that is on another device.
bool is_allocated(const char *address, uint64_t nbytes, uint64_t device);

// The caller of these is on the device. They block until their work is done.

void read_memory(Device &device, const char *from, char *to, uint64_t nbytes);
void write_memory(Device &device, char *to, const char *from, uint64_t nbytes);
void digest_memory(Device &device, const kvlc_bytes *spans, uint64_t count, uint32_t *crcs);

}  // namespace kvlc
