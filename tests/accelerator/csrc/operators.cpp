// Every kernel is the CPU's, on the same memory. The host learns the shapes of results from meta kernels and launches the
// work on the current stream; an operator whose result's shape depends on values makes the host wait, as on CUDA.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/TensorShape.h>
#include <torch/library.h>

#include <mutex>
#include <set>

#include "bindings.h"
#include "memory.h"
#include "streams.h"

namespace emulated {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet DEVICE_KEYS(c10::DispatchKey::PrivateUse1);

// ---- counting

struct Counter {
  std::mutex mutex;
  bool on = false;
  Counts counts;
};

Counter& counter() {
  static auto* all = new Counter;
  return *all;
}

void count_kernel(const std::string& name) {
  auto& c = counter();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (c.on) c.counts.kernels[name]++;
}

void count_wait(const std::string& name) {
  auto& c = counter();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (c.on) c.counts.waits[name]++;
}

void count_copy(bool to_device) {
  auto& c = counter();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (c.on) (to_device ? c.counts.to_device : c.counts.to_host)++;
}

// ---- tensors

bool on_device(const Tensor& x) { return x.defined() && x.device().type() == c10::DeviceType::PrivateUse1; }

Tensor empty(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, c10::DeviceIndex device) {
  auto old = exchange_device(device);
  auto x = at::detail::empty_strided_generic(size, stride, &device_allocator(), DEVICE_KEYS, dtype);
  exchange_device(old);
  return x;
}

Tensor empty_like(const Tensor& x, c10::DeviceIndex device) {
  return empty(x.sizes(), x.strides(), x.scalar_type(), device);
}

Tensor shape_of(const Tensor& x) {
  return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta).requires_grad(false));
}

// ---- one call

// The arguments of a call, as the meta kernel and as the CPU kernel take them.
struct Call {
  const c10::OperatorHandle& op;
  std::string name;
  std::vector<IValue> given;
  Stack meta, host;
  c10::DeviceIndex device = -1;
  bool indexes;

  Call(const c10::OperatorHandle& op, const Stack& stack) : op(op), name(op.schema().operator_name().name) {
    indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0 ||
              name.rfind("aten::_unsafe_index", 0) == 0;
    size_t n = op.schema().arguments().size();
    given.assign(stack.end() - static_cast<long>(n), stack.end());
    for (const auto& v : given) see(v);
    for (const auto& v : given) convert(v);
    if (device < 0) device = current_device();
  }

  void see(const IValue& v) {
    if (v.isTensor()) see(v.toTensor());
    if (v.isTensorList())
      for (const Tensor& x : v.toTensorVector()) see(x);
    if (v.isOptionalTensorList())
      for (const auto& x : v.toOptionalTensorVector())
        if (x) see(*x);
    if (v.isDevice() && v.toDevice().type() == c10::DeviceType::PrivateUse1 && device < 0)
      device = v.toDevice().has_index() ? v.toDevice().index() : current_device();
  }

  void see(const Tensor& x) {
    if (!on_device(x)) return;
    TORCH_CHECK(device < 0 || device == x.device().index(), name, ": expected all tensors to be on the same device, found ",
                "emulated:", static_cast<int>(device), " and ", x.device());
    device = x.device().index();
  }

  Tensor on_host(const Tensor& x) {
    if (!x.defined()) return x;
    if (on_device(x)) return host_view(x);
    TORCH_CHECK(device < 0 || x.dim() == 0 || indexes, name, ": expected all tensors to be on the same device, found ",
                "emulated:", static_cast<int>(device), " and ", x.device());
    if (device >= 0 && x.dim() > 0) count_copy(true);
    return x.detach().clone();  // read now: the host may change it before the kernel runs
  }

  void convert(const IValue& v) {
    if (v.isTensor()) {
      const Tensor& x = v.toTensor();
      meta.emplace_back(x.defined() ? shape_of(x) : x);
      host.emplace_back(on_host(x));
    } else if (v.isTensorList()) {
      c10::List<Tensor> shapes, values;
      for (const Tensor& x : v.toTensorVector()) {
        shapes.push_back(shape_of(x));
        values.push_back(on_host(x));
      }
      meta.emplace_back(shapes);
      host.emplace_back(values);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> shapes, values;
      for (const auto& x : v.toOptionalTensorVector()) {
        shapes.push_back(x ? std::optional<Tensor>(shape_of(*x)) : std::nullopt);
        values.push_back(x ? std::optional<Tensor>(on_host(*x)) : std::nullopt);
      }
      meta.emplace_back(shapes);
      host.emplace_back(values);
    } else if (v.isDevice()) {
      meta.emplace_back(c10::Device(at::kMeta));
      host.emplace_back(c10::Device(at::kCPU));
    } else if (v.isGenerator()) {
      meta.emplace_back(IValue());
      host.emplace_back(v);
    } else {
      meta.push_back(v);
      host.push_back(v);
    }
  }

  // The argument that return value `r` is, if the operator writes to one; -1 for a new tensor.
  int written(size_t r) const {
    const auto* alias = op.schema().returns()[r].alias_info();
    if (alias == nullptr) return -1;
    for (size_t i = 0; i < given.size(); i++) {
      const auto* mine = op.schema().arguments()[i].alias_info();
      if (mine != nullptr && mine->isWrite() && mine->beforeSets() == alias->beforeSets()) return static_cast<int>(i);
    }
    TORCH_CHECK(false, name, ": a view has no kernel of its own on the emulated accelerator");
  }

  // Shapes of the results, if a meta kernel knows them.
  std::optional<Stack> shapes() const {
    bool fresh = false;
    for (size_t r = 0; r < op.schema().returns().size(); r++) {
      const auto& type = op.schema().returns()[r].type();
      if (type->kind() != c10::TypeKind::TensorType && type->kind() != c10::TypeKind::ListType) return std::nullopt;
      fresh = fresh || written(r) < 0;
    }
    if (!fresh) {
      for (size_t i = 0; i < given.size(); i++)  // out= that has to be resized
        if (op.schema().arguments()[i].is_out() && given[i].isTensor() && given[i].toTensor().numel() == 0)
          return std::nullopt;
      return Stack();
    }
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::Meta)) return std::nullopt;
    Stack made = meta;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &made);
    } catch (const std::exception&) {  // depends on values; an error of the arguments is raised by the CPU kernel
      return std::nullopt;
    }
    return made;
  }
};

const std::set<std::string> WAITS = {"aten::nonzero", "aten::bincount", "aten::masked_select", "aten::_unique2",
                                     "aten::unique_dim", "aten::unique_consecutive", "aten::equal",
                                     "aten::repeat_interleave"};

void copy_result(const IValue& to, const IValue& from) {
  if (to.isTensor()) {
    if (to.toTensor().defined()) to.toTensor().copy_(from.toTensor());
  } else {
    auto targets = to.toTensorVector(), sources = from.toTensorVector();
    for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i]);
  }
}

IValue allocated(const IValue& shape, c10::DeviceIndex device) {
  if (shape.isTensor()) return shape.toTensor().defined() ? IValue(empty_like(shape.toTensor(), device)) : shape;
  c10::List<Tensor> made;
  for (const Tensor& x : shape.toTensorVector()) made.push_back(empty_like(x, device));
  return made;
}

IValue host_views(const IValue& v) {
  if (v.isTensor()) return host_view(v.toTensor());
  c10::List<Tensor> made;
  for (const Tensor& x : v.toTensorVector()) made.push_back(host_view(x));
  return made;
}

void launch(Call& call, const Stack& shapes, Stack* stack) {
  Stack results, targets;
  std::vector<bool> fresh;
  for (size_t r = 0; r < call.op.schema().returns().size(); r++) {
    int written = call.written(r);
    results.push_back(written >= 0 ? call.given[written] : allocated(shapes[r], call.device));
    targets.push_back(written >= 0 ? IValue() : host_views(results.back()));
    fresh.push_back(written < 0);
  }
  count_kernel(call.name);
  current_queue(call.device).launch([op = call.op, host = call.host, targets, fresh] {
    Stack values = host;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
    for (size_t r = 0; r < targets.size(); r++)
      if (fresh[r]) copy_result(targets[r], values[r]);
  });
  stack->insert(stack->end(), results.begin(), results.end());
}

void run_now(Call& call, Stack* stack) {
  auto& queue = current_queue(call.device);
  if (WAITS.count(call.name) > 0) count_wait(call.name);
  count_kernel(call.name);
  queue.synchronize();
  Stack values = call.host;
  call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
  for (size_t r = 0; r < values.size(); r++) {
    int written = call.written(r);
    if (written >= 0) {
      Tensor mine = call.given[written].toTensor(), made = values[r].toTensor();
      if (mine.sizes() != made.sizes()) {
        mine.resize_(made.sizes());
        queue.synchronize();
        host_view(mine).copy_(made);
      }
      stack->push_back(mine);
    } else if (values[r].isTensor() || values[r].isTensorList()) {
      auto made = allocated(values[r], call.device);
      queue.synchronize();
      copy_result(host_views(made), values[r]);
      stack->push_back(made);
    } else {
      stack->push_back(values[r]);
    }
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  auto shapes = call.shapes();
  stack->erase(stack->end() - static_cast<long>(call.given.size()), stack->end());
  if (shapes)
    launch(call, *shapes, stack);
  else
    run_now(call, stack);
}

// ---- operators that make or view memory

c10::DeviceIndex index_of(std::optional<c10::Device> device) { return device && device->has_index() ? device->index() : -1; }

at::ScalarType dtype_of(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()));
}

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<at::Device> device, std::optional<bool>,
                           std::optional<at::MemoryFormat> format) {
  auto old = exchange_device(index_of(device));
  auto x = at::detail::empty_generic(size, &device_allocator(), DEVICE_KEYS, dtype_of(dtype), format);
  exchange_device(old);
  return x;
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty(size, stride, dtype_of(dtype), index_of(device));
}

Tensor as_strided(const Tensor& x, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(x, size, stride, offset);
}

Tensor view(const Tensor& x, at::IntArrayRef size) { return at::native::view(x, size); }

Tensor reshape_alias(const Tensor& x, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(x, size, stride, x.storage_offset());
}

Tensor unfold(const Tensor& x, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(x, dim, size, step); }

Tensor view_as_real(const Tensor& x) { return at::native::view_as_real(x); }
Tensor view_as_complex(const Tensor& x) { return at::native::view_as_complex(x); }

const Tensor& resize_(const Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t bytes = static_cast<size_t>(impl->numel() + impl->storage_offset()) * x.itemsize();
  if (bytes > x.storage().nbytes()) hooks().resizePrivateUse1Bytes(x.storage(), bytes);
  return x;
}

Tensor& set_(Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return x;
}

void record_stream(Tensor& x, at::Stream stream) { used_by(x.storage().data(), stream); }

// ---- copies between devices

// The same memory, of the host, which may be freed: see copied_by.
Tensor unowned(const Tensor& x) {
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().requires_grad(false));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  bool from_device = on_device(source), to_device = on_device(target);
  if (from_device && to_device) {
    auto &mine = current_queue(source.device().index()), &other = current_queue(target.device().index());
    bool two = source.device() != target.device();
    if (two) mine.await(other.mark());
    count_kernel("aten::copy_");
    mine.launch([from = host_view(source), to = host_view(target)] { to.copy_(from); });
    if (two) other.await(mine.mark());
  } else if (to_device) {
    count_copy(true);
    // pageable memory is staged before the call returns; pinned memory is read when the copy runs
    bool later = non_blocking && source.is_pinned();
    auto stream = current_stream(target.device().index());
    if (later) copied_by(source.data_ptr(), stream);
    Tensor read = later ? unowned(source) : source.detach().clone();
    queue_of(stream).launch([read, to = host_view(target)] { to.copy_(read); });
  } else {
    count_copy(false);
    auto stream = current_stream(source.device().index());
    auto& queue = queue_of(stream);
    bool later = non_blocking && target.is_pinned();
    if (later) copied_by(target.data_ptr(), stream);
    queue.launch([from = host_view(source), to = later ? unowned(target) : target] { to.copy_(from); });
    if (!later) {
      count_wait("copy to the host");
      queue.synchronize();
    }
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

c10::Scalar local_scalar(const Tensor& x) {
  count_wait("aten::_local_scalar_dense");
  current_queue(x.device().index()).synchronize();
  return host_view(x).item();
}

// ---- convolutions, which PyTorch asks of a new device by names of their own

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  auto with = [&](const auto& of) {
    return [of, x = of(x), weight = of(weight), bias = bias && bias->defined() ? std::optional(of(*bias)) : std::nullopt,
            stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
            output_padding = output_padding.vec(), groups] {
      return at::convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
    };
  };
  Tensor made = empty_like(with(shape_of)(), x.device().index());
  count_kernel("aten::convolution");
  current_queue(x.device().index()).launch([to = host_view(made), compute = with(host_view)] { to.copy_(compute()); });
  return made;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  auto device = x.device().index();
  auto channels = grad.size(1);
  std::vector<Tensor> made = {wanted[0] ? empty_like(x, device) : Tensor(), wanted[1] ? empty_like(weight, device) : Tensor(),
                              wanted[2] ? empty({channels}, {1}, grad.scalar_type(), device) : Tensor()};
  std::vector<Tensor> to;
  for (const auto& t : made) to.push_back(host_view(t));
  count_kernel("aten::convolution_backward");
  current_queue(device).launch([to, grad = host_view(grad), x = host_view(x), weight = host_view(weight),
                                stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
                                output_padding = output_padding.vec(), groups, wanted, channels] {
    auto [dx, dweight, dbias] =
        at::convolution_backward(grad, x, weight, at::OptionalIntArrayRef(at::IntArrayRef(channels)), stride, padding,
                                 dilation, transposed, output_padding, groups, wanted);
    if (wanted[0]) to[0].copy_(dx);
    if (wanted[1]) to[1].copy_(dweight);
    if (wanted[2]) to[2].copy_(dbias);
  });
  return {made[0], made[1], made[2]};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", view_as_real);
  m.impl("view_as_complex", view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // where PyTorch would compute a new device's result from smaller operators
  for (const char* name : {"native_layer_norm", "native_group_norm", "native_group_norm_backward", "_grouped_mm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace

Tensor host_view(const Tensor& x) {
  if (!on_device(x)) return x;
  auto options = x.options().device(at::kCPU).requires_grad(false);
  if (x.numel() == 0) return at::empty_strided(x.sizes(), x.strides(), options);
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), options);
}

void count(bool on) {
  std::lock_guard<std::mutex> lock(counter().mutex);
  counter().on = on;
  if (on) counter().counts = Counts();
}

Counts counted() {
  std::lock_guard<std::mutex> lock(counter().mutex);
  return counter().counts;
}

}  // namespace emulated
