#include "bindings.h"

#include "memory.h"
#include "streams.h"

namespace emulated {
void launch_python(Queue& queue, py::object function) {
  auto held = std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* f) {
    py::gil_scoped_acquire locked;
    delete f;
  });
  queue.launch([held]() mutable {
    std::string message;
    {
      py::gil_scoped_acquire locked;
      try {
        (*held)();
      } catch (py::error_already_set& error) {
        message = error.what();
      }
    }
    held.reset();
    TORCH_CHECK(message.empty(), message);
  });
}

namespace {

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks()); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { exchange_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("device_count", [] { return DEVICES; });
  m.def("synchronize", [](int device) { synchronize_device(static_cast<c10::DeviceIndex>(device)); });
  m.def("host_view", &host_view);
  m.def("launch", [](py::object function) { launch_python(current_queue(-1), std::move(function)); });
  m.def("delay", [](uint64_t seed, double share, int microseconds) { delay_all({seed, share, microseconds}); });
  m.def("memory", [](int device) {
    auto found = memory_statistics(static_cast<c10::DeviceIndex>(device));
    return py::make_tuple(found.allocated, found.peak);
  });
  m.def("requested", [](int device) {
    auto found = requested_statistics(static_cast<c10::DeviceIndex>(device)), host = pinned_statistics();
    return py::make_tuple(found.allocated, found.peak, host.allocated, host.peak);
  });
  m.def("reset_peak", [](int device) { reset_peak(static_cast<c10::DeviceIndex>(device)); });
  m.def("count", &count);
  m.def("counted", [] {
    auto found = counted();
    return py::make_tuple(found.kernels, found.to_device, found.to_host, found.waits);
  });
  define_process_group(m);
}

}  // namespace
}  // namespace emulated
