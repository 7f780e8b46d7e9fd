// Memory of the emulated accelerator: host memory that is poison (all bits set: NaN, or -1) until a kernel writes it, and
// again from the moment in its stream at which the host freed it, as a caching allocator would reuse it from there on.
// Pinned memory of the host is poison from the end of the copies that were launched before the host freed it.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace emulated {

struct MemoryStatistics {
  int64_t allocated = 0;  // bytes that tensors hold now, as the host sees it
  int64_t peak = 0;

  void add(int64_t bytes) {
    allocated += bytes;
    if (allocated > peak) peak = allocated;
  }
};

c10::Allocator& device_allocator();
c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);
void used_by(const void* pointer, c10::Stream stream);  // Tensor.record_stream
void copied_by(const void* pinned, c10::Stream stream);
MemoryStatistics memory_statistics(c10::DeviceIndex device);   // in whole blocks
MemoryStatistics requested_statistics(c10::DeviceIndex device);  // in bytes that were asked for
MemoryStatistics pinned_statistics();
void reset_peak(c10::DeviceIndex device);  // of the host, too

}  // namespace emulated
