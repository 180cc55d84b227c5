#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <set>

#include "memory.h"
#include "tensors.h"

namespace simdev {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// Operators that CUDA, too, lets mix tensors of the host and the device.
const std::set<std::string> kMayMix = {"aten::index", "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_"};
// Those that make the host wait on a card, because it must know the result or its size.
const std::set<std::string> kHostReads = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::bincount", "aten::equal", "aten::repeat_interleave"};
// Their meta kernels give other dtypes than the CPU's kernels; the latter are asked for shapes.
const std::set<std::string> kShapesByCpu = {"aten::native_group_norm", "aten::native_layer_norm",
                                            "aten::native_group_norm_backward",
                                            "aten::native_layer_norm_backward",
                                            "aten::native_batch_norm",
                                            "aten::native_batch_norm_backward"};

template <class F>
IValue map_tensors(const IValue& value, F f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<Tensor> out;
    for (const Tensor& t : value.toTensorVector()) out.push_back(t.defined() ? f(t) : t);
    return IValue(out);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      out.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    return IValue(out);
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F f) {
  map_tensors(value, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// A scalar of the host, held by the queue until its kernel runs.
Tensor captured(const Tensor& host) {
  Tensor copy = host.detach().clone();
  if (host.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Tensor on_meta(const Tensor& tensor) {
  const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number() && !on_device(tensor);
  return number ? tensor : like_on_meta(tensor);
}

Tensor zeros_like_on_cpu(const Tensor& tensor) {
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::zeros({}, options).expand(tensor.sizes()).contiguous();
}

Tensor fresh_like(const Tensor& shape) {
  return empty_on_device(shape.sizes(), shape.strides(), shape.scalar_type());
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& given, Stack* stack);
  void run();

 private:
  void refuse_mixed_devices() const;
  void wait_as_a_card_would() const;
  void resize_outs();
  void prepare();
  bool infer();
  bool fills_by_chance() const;
  void fill_by_chance();
  void queue();
  void run_now();
  void return_arguments();
  Cost cost() const;
  const c10::Argument& argument(size_t i) const { return schema().arguments()[i]; }
  const c10::FunctionSchema& schema() const { return op_.schema(); }
  const std::string& name() const { return schema().name(); }

  c10::OperatorHandle op_;
  Stack* stack_;
  std::string given_;
  size_t count_;
  double operations_;
  bool random_ = false;
  std::vector<IValue> arguments_;
  std::vector<IValue> kernels_;  // arguments as the CPU's kernel gets them
  std::vector<IValue> results_;
  std::vector<bool> fresh_;  // results that are no argument
};

Call::Call(const c10::OperatorHandle& given, Stack* stack)
    : op_(given), stack_(stack), given_(given.schema().name()),
      count_(given.schema().arguments().size()),
      arguments_(stack->end() - count_, stack->end()) {
  operations_ = operations_of(given_, arguments_);
  auto& dispatcher = c10::Dispatcher::singleton();
  if (given_ == "aten::convolution_overrideable") {
    op_ = dispatcher.findSchemaOrThrow("aten::convolution", "");
  } else if (given_ == "aten::convolution_backward_overrideable") {
    op_ = dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
    const Tensor weight = arguments_[2].toTensor();
    const bool transposed = arguments_[6].toBool();
    const int64_t channels =
        transposed ? weight.size(1) * arguments_[8].toInt() : weight.size(0);
    arguments_.insert(arguments_.begin() + 3, IValue(std::vector<int64_t>{channels}));
  }
  for (size_t i = 0; i < arguments_.size(); ++i)
    random_ |= arguments_[i].isGenerator() || argument(i).name() == "generator";
  random_ |= name() == "aten::bernoulli" || name() == "aten::multinomial";
  for (const auto& result : schema().returns()) {
    const bool aliases = result.alias_info() != nullptr;
    TORCH_CHECK_NOT_IMPLEMENTED(!aliases || result.alias_info()->isWrite(), "simdev has no ",
                                name(), ", which returns a view");
    fresh_.push_back(!aliases);
  }
}

void Call::refuse_mixed_devices() const {
  if (kMayMix.count(name())) return;
  for (size_t i = 0; i < arguments_.size(); ++i)
    each_tensor(arguments_[i], [&](const Tensor& tensor) {
      TORCH_CHECK(on_device(tensor) || tensor.dim() == 0,
                  "Expected all tensors to be on the same device, but argument '",
                  argument(i).name(), "' of ", name(), " is on ", tensor.device(),
                  " and others are on ", device());
    });
}

void Call::wait_as_a_card_would() const {
  if (!kMayMix.count(name())) return;
  each_tensor(arguments_[1], [](const Tensor& index) {
    if (!on_device(index)) host_waits(current_stream(), "blocking_upload");
    if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte)
      host_waits(current_stream(), "shape_depends_on_data");
  });
}

// Tensors given as out= get the size that the operator asks for.
void Call::resize_outs() {
  std::vector<size_t> outs;
  for (size_t i = 0; i < arguments_.size(); ++i)
    if (argument(i).kwarg_only() && writes(argument(i)) && arguments_[i].isTensor() &&
        on_device(arguments_[i].toTensor()))
      outs.push_back(i);
  if (outs.empty()) return;
  std::vector<IValue> shapes;
  for (const auto& value : arguments_)
    shapes.push_back(value.isDevice() ? IValue(c10::Device(c10::kMeta))
                                      : map_tensors(value, on_meta));
  for (auto& value : shapes)
    if (value.isGenerator()) value = IValue();
  Stack stack = shapes;
  try {
    op_.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    count("unknown: " + name());
    return;
  }
  for (size_t i : outs) {
    const Tensor out = arguments_[i].toTensor(), wanted = shapes[i].toTensor();
    if (out.sizes() != wanted.sizes()) out.resize_(wanted.sizes());
  }
}

void Call::prepare() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const IValue& value = arguments_[i];
    if (value.isGenerator() || (value.isNone() && argument(i).name() == "generator")) {
      const at::Generator given = value.isNone() ? default_generator() : value.toGenerator();
      const bool ours = given.device().type() == kType;
      kernels_.push_back(ours ? IValue(host_generator(given)) : value);
    } else if (value.isDevice()) {
      kernels_.push_back(c10::Device(c10::kCPU));
    } else {
      kernels_.push_back(map_tensors(value, [](const Tensor& tensor) {
        return on_device(tensor) ? host_view(tensor) : captured(tensor);
      }));
    }
  }
}

// Create the results, if their shapes follow from the arguments' shapes.
bool Call::infer() {
  if (std::none_of(fresh_.begin(), fresh_.end(), [](bool fresh) { return fresh; })) {
    results_.resize(fresh_.size());
    return true;
  }
  if (random_ || kHostReads.count(name())) return false;
  const bool by_cpu = kShapesByCpu.count(name());
  const auto place = by_cpu ? c10::kCPU : c10::kMeta;
  Stack stack;
  for (const auto& value : arguments_)
    stack.push_back(value.isDevice() ? IValue(c10::Device(place))
                                     : map_tensors(value, [&](const Tensor& tensor) {
                                         return by_cpu ? zeros_like_on_cpu(tensor)
                                                       : on_meta(tensor);
                                       }));
  try {
    op_.callBoxed(&stack);
  } catch (const std::exception&) {
    return false;
  }
  for (size_t i = 0; i < fresh_.size(); ++i) {
    const IValue& shape = stack[stack.size() - fresh_.size() + i];
    if (fresh_[i] && !shape.isTensor() && !shape.isTensorList()) {
      results_.clear();
      return false;
    }
    results_.push_back(fresh_[i] ? map_tensors(shape, fresh_like) : IValue());
  }
  return true;
}

// Such as normal_: the numbers depend on the generator alone, in the order of the program.
bool Call::fills_by_chance() const {
  if (!random_) return false;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    bool reads = false;
    each_tensor(arguments_[i], [&](const Tensor&) { reads |= !writes(argument(i)); });
    if (reads) return false;
  }
  return std::none_of(fresh_.begin(), fresh_.end(), [](bool fresh) { return fresh; });
}

void Call::fill_by_chance() {
  Stack stack;
  std::vector<std::pair<Tensor, Tensor>> filled;
  for (const auto& value : kernels_)
    stack.push_back(map_tensors(value, [&](const Tensor& tensor) {
      Tensor numbers = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
      filled.emplace_back(tensor, numbers);
      return numbers;
    }));
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(&stack);
  }
  enqueue(current_stream(), [filled]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    for (auto& [to, numbers] : filled) to.copy_(numbers);
  }, cost());
}

Cost Call::cost() const {
  Cost cost{Engine::kCompute, given_.substr(given_.rfind(':') + 1)};
  cost.operations = operations_;
  for (size_t i = 0; i < arguments_.size(); ++i)
    each_tensor(arguments_[i], [&](const Tensor& tensor) {
      if (!(argument(i).kwarg_only() && writes(argument(i)))) cost.read += double(tensor.nbytes());
      if (writes(argument(i))) cost.written += double(tensor.nbytes());
      cost.half |= tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
    });
  for (const auto& result : results_)
    each_tensor(result, [&](const Tensor& tensor) { cost.written += double(tensor.nbytes()); });
  return cost;
}

// Results are held by address, so that a tensor that is freed early is freed early.
void Call::queue() {
  std::vector<IValue> held;
  for (const auto& result : results_) held.push_back(map_tensors(result, host_view));
  auto work = [op = op_, kernels = kernels_, held] {
    at::AutoDispatchBelowADInplaceOrView below;
    Stack stack(kernels.begin(), kernels.end());
    op.callBoxed(&stack);
    for (size_t i = 0; i < held.size(); ++i) {
      const IValue& got = stack[stack.size() - held.size() + i];
      if (held[i].isTensor()) {
        if (held[i].toTensor().defined()) held[i].toTensor().copy_(got.toTensor());
      } else if (held[i].isTensorList()) {
        auto to = held[i].toTensorVector(), from = got.toTensorVector();
        for (size_t k = 0; k < to.size(); ++k)
          if (to[k].defined()) to[k].copy_(from[k]);
      }
    }
  };
  enqueue(current_stream(), std::move(work), cost());
}

// Shapes are not known before the kernel has run.
void Call::run_now() {
  bool masked = false;
  if (kMayMix.count(name()))
    each_tensor(arguments_[1], [&](const Tensor& index) {
      masked |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
  if (kHostReads.count(name())) {
    host_waits(current_stream(), "shape_depends_on_data");
  } else if (!masked) {  // with a mask the host has already waited
    drain(current_stream(), (random_ ? "random " : "unknown ") + name());
  }
  Stack stack(kernels_.begin(), kernels_.end());
  {
    Lock lock(mutex());
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(&stack);
  }
  for (size_t i = 0; i < fresh_.size(); ++i) {
    const IValue& got = stack[stack.size() - fresh_.size() + i];
    results_.push_back(!fresh_[i] ? IValue() : map_tensors(got, [](const Tensor& tensor) {
      Tensor result = fresh_like(tensor);
      if (tensor.numel()) host_view(result).copy_(tensor);
      return result;
    }));
  }
  Lock lock(mutex());
  virtual_clock().run(current_stream(), cost());
}

// Results that are arguments, such as that of add_.
void Call::return_arguments() {
  for (size_t i = 0; i < fresh_.size(); ++i) {
    if (fresh_[i]) continue;
    const auto& wanted = schema().returns()[i].alias_info()->beforeSets();
    for (size_t k = 0; k < arguments_.size(); ++k)
      if (writes(argument(k)) && argument(k).alias_info()->beforeSets() == wanted) {
        results_[i] = arguments_[k];
        break;
      }
  }
}

void Call::run() {
  refuse_mixed_devices();
  wait_as_a_card_would();
  resize_outs();
  prepare();
  count("kernels");
  if (fills_by_chance()) {
    results_.resize(fresh_.size());
    fill_by_chance();
  } else if (infer() && !random_) {
    queue();
  } else {
    results_.clear();
    run_now();
  }
  return_arguments();
  torch::jit::drop(*stack_, count_);
  stack_->insert(stack_->end(), results_.begin(), results_.end());
}

}  // namespace

void call_on_device(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_device>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch would take these apart.
  for (auto* name : {"native_group_norm", "native_group_norm_backward", "native_layer_norm",
                     "native_layer_norm_backward", "convolution_overrideable",
                     "convolution_backward_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_on_device>());
}

}  // namespace simdev
