#include "memory.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <vector>

#include "streams.h"

namespace emulated {
namespace {

constexpr size_t ALIGNMENT = 512;  // as CUDA's caching allocator
constexpr int POISON = 0xff;

struct Block {
  void* pointer;
  size_t bytes, requested;
  c10::Stream stream;                 // where it was allocated
  std::set<int64_t> others = {};      // streams that also use it
};

struct PinnedBlock {
  size_t bytes;
  std::set<std::pair<c10::DeviceIndex, int64_t>> streams = {};  // that copy to it or from it
};

struct Pool {
  std::mutex mutex;
  std::map<void*, Block> used;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> free;  // by device, stream, bytes
  MemoryStatistics statistics[DEVICES], requested[DEVICES], host;
  std::map<const char*, PinnedBlock> pinned;
};

Pool& pool() {
  static Pool* all = new Pool;  // tensors may be freed after statics are
  return *all;
}

void* aligned(size_t bytes) {
  void* pointer = nullptr;
  if (posix_memalign(&pointer, ALIGNMENT, bytes) != 0) throw std::bad_alloc();
  return pointer;
}

// The host frees: from here on in the stream, the memory is somebody else's. Other streams that were recorded end first.
void release(void* pointer) {
  auto& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  auto found = p.used.find(pointer);
  if (found == p.used.end()) return;
  Block block = found->second;
  p.used.erase(found);
  p.statistics[block.stream.device_index()].add(-static_cast<int64_t>(block.bytes));
  p.requested[block.stream.device_index()].add(-static_cast<int64_t>(block.requested));
  auto& queue = queue_of(block.stream);
  for (auto id : block.others)
    queue.await(queue_of(c10::Stream(c10::Stream::UNSAFE, block.stream.device(), id)).mark());
  queue.launch([block] { memset(block.pointer, POISON, block.bytes); });
  p.free[{block.stream.device_index(), block.stream.id(), block.bytes}].push_back(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto stream = current_stream(-1);
    auto device = stream.device();
    if (bytes == 0) return {nullptr, device};
    auto requested = bytes;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto& p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    auto& reusable = p.free[{device.index(), stream.id(), bytes}];
    void* pointer = nullptr;
    if (reusable.empty()) {
      pointer = aligned(bytes);
      memset(pointer, POISON, bytes);
    } else {
      pointer = reusable.back();
      reusable.pop_back();
    }
    p.used.emplace(pointer, Block{pointer, bytes, requested, stream});
    p.statistics[device.index()].add(static_cast<int64_t>(bytes));
    p.requested[device.index()].add(static_cast<int64_t>(requested));
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    current_queue(-1).launch([=] { memcpy(to, from, bytes); });
  }
};

// As PyTorch's caching allocator of pinned memory: the host may free what copies still use; somebody else has it later.
void release_pinned(void* pointer) {
  auto& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  auto found = p.pinned.find(static_cast<const char*>(pointer));
  PinnedBlock block = found->second;
  p.pinned.erase(found);
  p.host.add(-static_cast<int64_t>(block.bytes));
  Queue* last = nullptr;
  for (auto [device, id] : block.streams) {
    auto& queue = queue_of(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device), id));
    if (last != nullptr) queue.await(last->mark());
    last = &queue;
  }
  if (last == nullptr) return free(pointer);
  last->launch([pointer, bytes = block.bytes] {
    memset(pointer, POISON, bytes);
    free(pointer);
  });
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = aligned(std::max(bytes, ALIGNMENT));
    auto& p = pool();
    std::lock_guard<std::mutex> lock(p.mutex);
    p.pinned[static_cast<const char*>(pointer)] = PinnedBlock{bytes};
    p.host.add(static_cast<int64_t>(bytes));
    return {pointer, pointer, &release_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

DeviceAllocator allocator;
PinnedAllocator pinned;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

}  // namespace

c10::Allocator& device_allocator() { return allocator; }
c10::Allocator& pinned_allocator() { return pinned; }

bool is_pinned(const void* pointer) {
  auto& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  auto after = p.pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == p.pinned.begin()) return false;
  auto found = std::prev(after);
  return static_cast<const char*>(pointer) < found->first + std::max<size_t>(found->second.bytes, 1);
}

void copied_by(const void* pointer, c10::Stream stream) {
  auto& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  auto after = p.pinned.upper_bound(static_cast<const char*>(pointer));
  if (after != p.pinned.begin()) std::prev(after)->second.streams.insert({stream.device_index(), stream.id()});
}

void used_by(const void* pointer, c10::Stream stream) {
  auto& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  auto after = p.used.upper_bound(const_cast<void*>(pointer));
  if (after == p.used.begin()) return;
  auto& block = std::prev(after)->second;
  if (block.stream != stream) block.others.insert(stream.id());
}

MemoryStatistics memory_statistics(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  return pool().statistics[device];
}

MemoryStatistics requested_statistics(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  return pool().requested[device];
}

MemoryStatistics pinned_statistics() {
  std::lock_guard<std::mutex> lock(pool().mutex);
  return pool().host;
}

void reset_peak(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(pool().mutex);
  for (auto* one : {&pool().statistics[device], &pool().requested[device], &pool().host}) one->peak = one->allocated;
}

}  // namespace emulated
