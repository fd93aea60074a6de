// Every operator: its kernel is the CPU's, on the bytes of the device; a tensor of the host is refused, as on a GPU.
#include "apart.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <unordered_map>

namespace apart {

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == NPU; }

at::Tensor on_host(const at::Tensor& tensor) {
  auto* block = block_of(tensor);
  c10::DataPtr bytes(block->data, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t{}, tensor.storage().nbytes(), std::move(bytes), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

namespace {

at::Tensor empty_strided_on(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard there(device);
  return at::detail::empty_strided_generic(
      size, stride, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

c10::Device or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::impl::VirtualGuardImpl(NPU).getDevice();
}

}  // namespace

at::Tensor on_device(const at::Tensor& made, c10::Device device) {
  if (!made.defined()) return made;
  auto tensor = empty_strided_on(made.sizes(), made.strides(), made.scalar_type(), device);
  on_host(tensor).copy_(made);
  return tensor;
}

namespace {

// --- One call of an operator ---

// The kernels of these find out shapes or values that the host needs, so that it waits.
const std::set<std::string> DATA_DEPENDENT = {"aten::nonzero", "aten::masked_select", "aten::_unique2"};

struct Call {
  const c10::FunctionSchema& schema;
  bool is_view = false, waits = false;
  std::optional<c10::Device> device;
  int stream = 0;
  uint64_t time = 0;
  std::vector<at::Tensor> seen;                                // on the device, as they were given
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals;  // by their CPU tensors

  explicit Call(const c10::FunctionSchema& schema) : schema(schema) {
    const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
    is_view = alias && !alias->isWrite();
    for (const auto& result : schema.returns()) {
      auto kind = result.type()->kind();
      waits = waits || kind == c10::TypeKind::BoolType || kind == c10::TypeKind::NumberType;
    }
    waits = waits || DATA_DEPENDENT.count(schema.name());
  }

  void run_on(c10::Device chosen) {
    device = chosen;
    stream = current_stream(device->index());
    if (!is_view) time = queue(stream);
  }

  void choose(const at::Tensor& tensor) {
    if (!is_here(tensor)) return;
    if (!device) run_on(tensor.device());
    TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but ", schema.name(),
                " was given ", *device, " and ", tensor.device());
  }

  at::Tensor host(const at::Tensor& tensor, bool writes, bool is_index = false) {
    if (!tensor.defined()) return tensor;
    if (!is_here(tensor)) {
      if (is_index && tensor.device().is_cpu()) { waits = true; counts.to_device += tensor.nbytes(); return tensor; }
      TORCH_CHECK(tensor.dim() == 0 || !tensor.device().is_cpu(), "Expected all tensors to be on the same device, but ",
                  schema.name(), " was given one of the host, of shape ", tensor.sizes());
      return tensor;
    }
    if (!is_view) touch(tensor, stream, time, writes, schema.name());
    bool is_to_be_sized = writes && tensor.dim() == 1 && !tensor.numel();
    auto alias = is_to_be_sized ? at::empty({0}, tensor.options().device(at::kCPU)) : on_host(tensor);
    originals[alias.unsafeGetTensorImpl()] = tensor;
    return alias;
  }

  at::Tensor result(const at::Tensor& made) {
    if (!made.defined() || !made.device().is_cpu()) return made;
    auto given = originals.find(made.unsafeGetTensorImpl());
    if (given != originals.end()) return written(given->second, made);
    for (const auto& [impl, original] : originals)
      if (original.storage().data() == made.storage().data()) return view(original, made);
    auto fresh = on_device(made, *device);
    touch(fresh, stream, time, true, schema.name());
    return fresh;
  }

  // What was empty is as large as the kernel made it.
  at::Tensor written(const at::Tensor& original, const at::Tensor& made) {
    if (made.sizes() != original.sizes()) {
      const_cast<at::Tensor&>(original).resize_(made.sizes());
      on_host(original).copy_(made);
      touch(original, stream, time, true, schema.name());
    }
    return original;
  }

  static at::Tensor view(const at::Tensor& original, const at::Tensor& made) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(original.storage()), original.key_set(), made.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    return tensor;
  }
};

template <class F>
void for_each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) f(value.toTensor());
  else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) f(tensor);
  else if (value.isOptionalTensorList())
    for (const auto& tensor : value.toOptionalTensorVector()) if (tensor) f(*tensor);
}

c10::IValue argument_on_host(Call& call, const c10::Argument& argument, const c10::IValue& value) {
  bool writes = argument.alias_info() && argument.alias_info()->isWrite();
  if (value.isTensor()) return call.host(value.toTensor(), writes);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.host(tensor, writes));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(call.host(*tensor, writes, true)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == NPU) return c10::Device(c10::kCPU);
  if (argument.name() == "generator") return host_generator(value.to<std::optional<at::Generator>>(), *call.device);
  return value;
}

c10::IValue result_on_device(Call& call, const c10::IValue& value) {
  if (value.isTensor()) return call.result(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.result(tensor));
  return list;
}

}  // namespace

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Kernel& kernel) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call(op.schema());
  size_t given = op.schema().arguments().size(), made = op.schema().returns().size();
  auto arguments = stack->end() - given;
  for (size_t i = 0; i < given; i++) for_each_tensor(arguments[i], [&](const at::Tensor& t) { call.choose(t); });
  if (!call.device) call.run_on(or_current(std::nullopt));
  for (size_t i = 0; i < given; i++) arguments[i] = argument_on_host(call, op.schema().arguments()[i], arguments[i]);
  if (!call.is_view) {
    std::lock_guard<std::recursive_mutex> lock(guard);
    counts.operators[op.schema().name()]++;
  }
  if (call.waits) {
    count_wait(op.schema().name().c_str());
    wait_for_stream(call.stream);
  }
  c10::DeviceGuard there(*call.device);
  kernel(stack);
  for (auto value = stack->end() - made; value != stack->end(); value++) *value = result_on_device(call, *value);
}

namespace {

void run_as_it_is(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, stack, [&](torch::jit::Stack* arguments) { op.callBoxed(arguments); });
}

// --- Memory and copies ---

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided_on(size, stride, c10::dtype_or_default(dtype), or_current(device));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard there(or_current(device));
  return at::detail::empty_generic(size, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, int stream, bool late) {
  counts.to_device += from.nbytes();
  if (late) return copy_later(to, [from, to] { at::NoGradGuard no_grad; on_host(to).copy_(from); });
  count_wait("a copy to the device");
  wait_for_stream(stream);
  on_host(to).copy_(from);
}

// What is on its way is no value yet: NaN, or 0 where there is none.
void copy_to_host(const at::Tensor& from, const at::Tensor& to, int stream, uint64_t time, bool late) {
  counts.to_host += from.nbytes();
  if (late) {
    auto now = on_host(from).clone();  // later operators of the stream do not change what is sent
    if (at::isFloatingType(to.scalar_type())) to.fill_(std::numeric_limits<double>::quiet_NaN());
    else to.zero_();
    return deliver_to_host_at(stream, time, [now, to] { at::NoGradGuard no_grad; to.copy_(now); });
  }
  count_wait("a copy to the host");
  wait_for_stream(stream);
  to.copy_(on_host(from));
}

at::Tensor copy(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (!from.numel()) return to;
  auto device = is_here(to) ? to.device() : from.device();
  int stream = current_stream(device.index());
  auto time = queue(stream);
  if (is_here(from)) touch(from, stream, time, false, "copy_");
  if (is_here(to)) {  // a copy that arrives late waits for no other
    std::lock_guard<std::recursive_mutex> lock(guard);
    bool late = !is_here(from) && non_blocking && is_pinned(from.storage().data());
    auto waiting = late ? std::exchange(block_of(to)->late, {}) : std::vector<std::function<void()>>{};
    touch(to, stream, time, true, "copy_");
    block_of(to)->late = std::move(waiting);
  }
  if (!is_here(from)) copy_to_device(from, to, stream, non_blocking && is_pinned(from.storage().data()));
  else if (!is_here(to)) copy_to_host(from, to, stream, time, non_blocking && is_pinned(to.storage().data()));
  else {
    std::lock_guard<std::recursive_mutex> lock(guard);
    counts.operators["aten::copy_"]++;
    if (from.device() != to.device()) order(current_stream(from.device().index()), stream);
    on_host(to).copy_(on_host(from));
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  int stream = current_stream(tensor.device().index());
  touch(tensor, stream, queue(stream), false, "item");
  counts.to_host += tensor.nbytes();
  count_wait("item");
  wait_for_stream(stream);
  return on_host(tensor).item();
}

}  // namespace

void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard there(storage.device());
  auto fresh = device_memory()->allocate(bytes);
  auto* before = (Block*)storage.data_ptr().get_context();
  if (before) {
    arrive(before);
    std::memcpy(fresh.get(), before->data, std::min(bytes, storage.nbytes()));
  }
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

namespace {

const at::Tensor& resize_(const at::Tensor& tensor, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (bytes > impl->storage().nbytes()) resize_bytes(impl->storage(), bytes);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) impl->set_sizes_contiguous(sizes);
  else impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return tensor;
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.dtype().itemsize();
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_storage_offset(0);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({count});
  return tensor;
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return tensor;
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  block_of(tensor)->recorded.insert(stream.id());
}

// As in torch_npu: `module.to("npu")` keeps the identity of parameters.
bool has_compatible_shallow_copy_type(const at::Tensor& own, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& tensor) {
    return tensor.key_set().has(c10::DispatchKey::CPU) || tensor.key_set().has(c10::DispatchKey::PrivateUse1);
  };
  return own.key_set() == from.key_set() || (is_dense(own) && is_dense(from));
}

bool is_taken_apart(const c10::OperatorName& name) {
  auto op = c10::Dispatcher::singleton().findOp(name);
  if (!op || name.name.rfind("aten::", 0) != 0) return false;
  bool has_kernel = op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || name.name.rfind("aten::_foreach_", 0) == 0;
  return has_kernel && (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
                        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_as_it_is>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  // What PyTorch takes apart for an unknown device, and computes by one kernel on a CPU or, lists of tensors, on a GPU.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (is_taken_apart(name)) {
      auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_as_it_is>());
    }
}

// PyTorch 2.7 does not know by itself how to pass autograd by; and shards of a tensor would be asked what only autograd is.
bool is_passed_by() {
  return c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(c10::DispatchKey::AutogradPrivateUse1);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  if (!is_passed_by()) m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  if (!is_passed_by()) m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace apart
