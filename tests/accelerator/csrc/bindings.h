// What the parts of the emulated accelerator share with its Python module.
#pragma once


#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

namespace emulated {

class Queue;

at::PrivateUse1HooksInterface& hooks();

at::Tensor host_view(const at::Tensor& x);  // the same memory, as a CPU tensor that does not keep it

// What a host asked of the device since counting began.
struct Counts {
  std::map<std::string, int64_t> kernels;  // launches, by operator
  int64_t to_device = 0, to_host = 0;      // copies
  std::map<std::string, int64_t> waits;    // what made the host wait for the device
};

void launch_python(Queue& queue, py::object function);  // runs when its turn comes

void define_process_group(py::module_& m);

void count(bool on);
Counts counted();

}  // namespace emulated
