// Every operation of the device is the CPU's, reached through one boxed fallback that hands it CPU tensors over the same
// bytes. Nothing is copied: views, in-place and out= variants, foreach and fused optimizers all come from this.
#pragma once
#include <ATen/Operators.h>
#include <torch/library.h>
#include <sstream>
#include "device.h"

namespace standin {
bool is_neuron(const Tensor& t) { return t.defined() && t.device().type() == kNeuron; }

// The data pointer of a new storage on `device`, over the same bytes as `storage`, which it keeps alive.
c10::DataPtr share(const c10::Storage& storage, Device device) {
  auto free = [](void* pointer) { delete static_cast<c10::Storage*>(pointer); };
  return c10::DataPtr(storage.mutable_data(), new c10::Storage(storage), free, device);
}

Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// A CPU tensor over a device tensor's bytes.
Tensor host_alias(const Tensor& t) {
  if (!is_neuron(t)) return t;
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), t.storage().nbytes(), share(t.storage(), Device(c10::kCPU)), c10::GetCPUAllocator(),
      true);
  return make_tensor(std::move(storage), c10::DispatchKey::CPU, t);
}

c10::DataPtr adopt_storage(const c10::Storage& host, DeviceIndex device) {
  return allocator->adopt(share(host, Device(c10::kCPU)), host.nbytes(), device);
}

// The tensors of one call: device tensors and their aliases on the way in, results on the way out.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> aliases;
  DeviceIndex device = -1;

  Tensor enter(const Tensor& t) {
    if (!is_neuron(t)) return t;
    TORCH_CHECK(
        device < 0 || device == t.device().index(), "Expected all tensors to be on the same device, but found neuron:",
        int(device), " and ", t.device());
    device = t.device().index();
    for (auto& [tensor, alias] : aliases)
      if (tensor.is_same(t)) return alias;
    return aliases.emplace_back(t, host_alias(t)).second;
  }
  Tensor leave(const Tensor& result) {
    if (!result.defined() || is_neuron(result)) return result;
    for (auto& [tensor, alias] : aliases) {
      if (alias.is_same(result)) return tensor;  // in-place or out=
      if (alias.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())  // a view
        return make_tensor(tensor.storage(), c10::DispatchKey::PrivateUse1, result);
    }
    c10::DataPtr data = adopt_storage(result.storage(), checked(device));
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), result.storage().nbytes(), std::move(data), allocator, true);
    return make_tensor(std::move(storage), c10::DispatchKey::PrivateUse1, result);
  }
  void write_back() {  // resize_ and out= may have given an alias another size or storage
    for (auto& [tensor, alias] : aliases) {
      c10::Storage storage = tensor.storage();
      if (alias.storage().data() != storage.data() || alias.storage().nbytes() != storage.nbytes()) {
        storage.set_data_ptr_noswap(adopt_storage(alias.storage(), storage.device().index()));
        storage.set_nbytes(alias.storage().nbytes());
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides() ||
          alias.storage_offset() != tensor.storage_offset())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

bool has_type(const c10::Argument& argument, c10::TypeKind kind) {
  auto type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == kind;
}

bool is_view(const c10::FunctionSchema& schema) {
  if (schema.is_mutable()) return false;
  for (auto& result : schema.returns())
    if (result.alias_info()) return true;
  return false;
}

// Replace each tensor of a value, a list or an optional list.
template <typename F>
void replace_tensors(c10::IValue& value, F replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(replace(t));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList().vec())
      list.push_back(t ? std::optional<Tensor>(replace(*t)) : std::nullopt);
    value = list;
  }
}

void tell_operation(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  py::gil_scoped_acquire gil;
  py::list tensors;
  py::dict others;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& name = schema.arguments()[i].name();
    c10::IValue value = arguments[i];
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
      replace_tensors(value, [&](const Tensor& t) {
        if (t.defined()) tensors.append(py::make_tuple(name, t));
        return t;
      });
    } else if (has_type(schema.arguments()[i], c10::TypeKind::GeneratorType)) {
      others[py::str(name)] = "random";
    } else if (!value.isNone()) {
      std::ostringstream text;
      text << value;
      others[py::str(name)] = text.str();
    }
  }
  (*on_operation)(schema.name(), tensors, others, is_view(schema));
}

void tell_result(const c10::FunctionSchema& schema, c10::IValue* begin, c10::IValue* end) {
  py::gil_scoped_acquire gil;
  py::list results;
  for (; begin != end; begin++)
    replace_tensors(*begin, [&](const Tensor& t) {
      if (t.defined()) results.append(t);
      return t;
    });
  (*on_result)(schema.name(), results, is_view(schema));
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  touch();
  const auto& schema = op.schema();
  size_t first = stack->size() - schema.arguments().size();
  tell_operation(schema, stack->data() + first);
  Call call;
  for (size_t i = first; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    replace_tensors(value, [&](const Tensor& t) { return call.enter(t); });
    if (value.isDevice() && value.toDevice().type() == kNeuron) {
      call.device = checked(value.toDevice().index());
      value = Device(c10::kCPU);
    }
  }
  for (size_t i = first; i < stack->size(); i++) {
    if (!has_type(schema.arguments()[i - first], c10::TypeKind::GeneratorType)) continue;
    c10::IValue& value = (*stack)[i];
    at::Generator generator = value.isNone() ? default_generator(call.device) : value.toGenerator();
    TORCH_CHECK(
        generator.device().type() == kNeuron, "Expected a 'neuron' generator but found '", generator.device(), "'");
    value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  size_t first_result = stack->size() - schema.returns().size();
  for (size_t i = first_result; i < stack->size(); i++)
    replace_tensors((*stack)[i], [&](const Tensor& t) { return call.leave(t); });
  tell_result(schema, stack->data() + first_result, stack->data() + stack->size());
}

// The few operations that such a fallback cannot express.
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  touch();
  {
    py::gil_scoped_acquire gil;
    py::list tensors;
    tensors.append(py::make_tuple("self", from));
    tensors.append(py::make_tuple("dst", to));
    (*on_operation)("aten::_copy_from", tensors, py::dict(), false);
  }
  host_alias(to).copy_(host_alias(from));
  return to;
}

Tensor& set_storage_sizes(
    Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(storage.device_type() == kNeuron, "set_: the storage is not on neuron");
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  std::vector<int64_t> contiguous(sizes.size(), 1);
  for (int64_t d = int64_t(sizes.size()) - 2; d >= 0; d--)
    contiguous[d] = contiguous[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides.empty() ? at::IntArrayRef(contiguous) : strides, offset.expect_int());
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage storage) {
  c10::SymInt size = int64_t(storage.nbytes() / self.dtype().itemsize());
  return set_storage_sizes(self, std::move(storage), 0, {size}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_sizes(
      self, source.storage(), source.storage_offset(), c10::fromIntArrayRefSlow(source.sizes()),
      c10::fromIntArrayRefSlow(source.strides()));
}
Tensor& set_nothing(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;  // SDPBackend::math: composed of plain operations
}

void record_stream(Tensor&, Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("set_.source_Storage_storage_offset", set_storage_sizes);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("record_stream", record_stream);
  // torch would compose these of others, with int64 indices and with a host that reads the offsets; the device has them.
  m.impl("index.Tensor", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace standin
