// What PyTorch asks of a device type: guards, streams, events, memory, generators.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "bindings.h"
#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

void count_wait(const std::string& name);

using Event = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return static_type; }
  c10::Device exchangeDevice(c10::Device to) const override { return {static_type, exchange_device(to.index())}; }
  c10::Device getDevice() const override { return {static_type, current_device()}; }
  void setDevice(c10::Device to) const override { exchange_device(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(to.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device of) const override { return current_stream(of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream getNewStream(c10::Device of, int) const override { return new_stream(of.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return new_stream(of.index()); }
  c10::Stream exchangeStream(c10::Stream to) const override { return exchange_stream(to); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("a stream");
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    delete static_cast<Event*>(*event);
    *event = new Event(queue_of(stream).mark());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) queue_of(stream).await(*static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || (*static_cast<Event*>(event))->done(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_without_gil([&] { (*static_cast<Event*>(event))->wait(); });
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto start = *static_cast<Event*>(from), end = *static_cast<Event*>(to);
    wait_without_gil([&] { end->wait(); });
    return std::chrono::duration<double, std::milli>(end->time() - start->time()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    used_by(pointer.get(), stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::DeviceType::PrivateUse1, current_device()}; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto* generator = new at::Generator(at::make_generator<at::CPUGeneratorImpl>(0));
    return *generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_allocator().allocate(bytes);
    auto kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_allocator().copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

}  // namespace

at::PrivateUse1HooksInterface& hooks() {
  static auto* all = new Hooks;
  return *all;
}

}  // namespace emulated
