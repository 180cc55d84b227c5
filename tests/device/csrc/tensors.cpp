// Operators that only change how a tensor sees its memory, and random number generators.
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/WrapDimMinimal.h>
#include <torch/library.h>

#include <cstring>

#include "memory.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::SymIntArrayRef;

struct Generator final : c10::GeneratorImpl {
  at::Generator host = at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val);

  Generator()
      : c10::GeneratorImpl(simdev::device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->host = host.clone();
    return copy;
  }
};

std::vector<int64_t> ints(SymIntArrayRef values) {
  std::vector<int64_t> result;
  for (const auto& value : values) result.push_back(value.expect_int());
  return result;
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return empty_on_device(size, stride, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  return alias(self, ints(size), ints(stride),
               offset ? offset->expect_int() : self.storage_offset(), self.dtype());
}

Tensor view(const Tensor& self, SymIntArrayRef size) {
  const auto shape = at::infer_size_dv(ints(size), self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), shape);
  TORCH_CHECK(stride.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return alias(self, shape, *stride, self.storage_offset(), self.dtype());
}

Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return alias(self, ints(size), ints(stride), self.storage_offset(), self.dtype());
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  dimension = c10::maybe_wrap_dim(dimension, self.dim());
  auto sizes = self.sizes().vec(), strides = self.strides().vec();
  sizes.push_back(size);
  strides.push_back(strides[dimension]);
  sizes[dimension] = (sizes[dimension] - size) / step + 1;
  strides[dimension] *= step;
  return alias(self, sizes, strides, self.storage_offset(), self.dtype());
}

const Tensor& resize_(const Tensor& self, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(ints(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_strided(Tensor& self, c10::Storage source, c10::SymInt offset, SymIntArrayRef size,
                    SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(ints(size));
  } else {
    impl->set_sizes_and_strides(ints(size), ints(stride));
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const int64_t count = source.nbytes() / self.element_size();
  return set_strided(self, std::move(source), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0,
                                        device_allocator().allocate(0), &device_allocator(), true));
}

// The same memory with other strides; torch knows which.
void view_of_complex(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Tensor self = torch::jit::pop(*stack).toTensor();
  torch::jit::Stack shapes{c10::IValue(like_on_meta(self))};
  op.callBoxed(&shapes);
  const Tensor seen = shapes[0].toTensor();
  const int64_t offset = op.schema().name() == "aten::view_as_real" ? self.storage_offset() * 2
                                                                    : self.storage_offset() / 2;
  stack->push_back(alias(self, seen.sizes(), seen.strides(), offset, seen.dtype()));
}

void record_stream_of(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream.id());
}

// `parameter.data = tensor` and `module.to()` may move a tensor between the host and the device, as
// they may for CUDA.
bool has_compatible_shallow_copy_type(const Tensor&, const Tensor&) { return true; }

}  // namespace

at::Generator new_generator() { return at::make_generator<Generator>(); }

const at::Generator& default_generator() {
  static const auto* instance = new at::Generator(new_generator());
  return *instance;
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  const size_t kept = std::min<size_t>(impl->nbytes(), bytes);
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  if (kept && storage.data()) {
    void *to = reach(fresh.get()), *from = reach(storage.data());
    Cost cost{Engine::kCompute, "resize", double(kept), double(kept)};
    enqueue(current_stream(), [=] { memcpy(to, from, kept); }, cost);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

Tensor alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, int64_t offset,
             caffe2::TypeMeta dtype) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), dtype);
  auto* impl = out.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return out;
}

Tensor like_on_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           tensor.options().device(c10::kMeta).requires_grad(false));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_strided);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream_of);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("view_as_real", torch::CppFunction::makeFromBoxedFunction<&view_of_complex>());
  m.impl("view_as_complex", torch::CppFunction::makeFromBoxedFunction<&view_of_complex>());
}

}  // namespace simdev
