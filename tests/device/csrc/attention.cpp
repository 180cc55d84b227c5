// Fused attention and dropout, so that neither memory nor arithmetic is that of torch's unfused
// formulas. The numbers are those of the CPU's kernels.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "memory.h"
#include "operators.h"

namespace simdev {
namespace {

using at::Tensor;
using Mask = std::optional<Tensor>;

Mask mask_view(const Mask& mask) {
  return mask && mask->defined() ? Mask(host_view(*mask)) : std::nullopt;
}

// Sizes without memory, also of torch.compile's fake tensors.
Tensor shape_of(const Tensor& tensor) {
  static char nothing;
  return at::from_blob(&nothing, tensor.sizes(), tensor.strides(), [](void*) {},
                       at::TensorOptions().dtype(tensor.dtype()), c10::Device(c10::kCPU));
}

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
               double dropout, bool causal, std::optional<double> scale, bool grouped) {
  if (query.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
    return int64_t(at::SDPBackend::math);
  const bool masked = mask && mask->defined(), learns = masked && mask->requires_grad();
  const int64_t on_cpu = at::native::_fused_sdp_choice_cpp(
      shape_of(query), shape_of(key), shape_of(value),
      masked ? Mask(shape_of(*mask)) : std::nullopt, dropout, causal, scale, grouped);
  const bool fused = on_cpu == int64_t(at::SDPBackend::flash_attention) && !learns;
  return int64_t(fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

double bytes(std::initializer_list<Tensor> tensors) {
  double sum = 0;
  for (const auto& tensor : tensors) sum += tensor.defined() ? double(tensor.nbytes()) : 0;
  return sum;
}

Cost cost_of(const char* name, const char* op, std::vector<c10::IValue> given, double read,
             double written) {
  Cost cost{Engine::kCompute, name, read, written};
  cost.operations = operations_of(op, given);
  const auto dtype = given.back().toTensor().scalar_type();
  cost.half = dtype == at::kBFloat16 || dtype == at::kHalf;
  return cost;
}

// The layout of the CPU's kernel: [batch, length, heads, width] seen as [batch, heads, …].
Tensor like_result(const Tensor& query, int64_t width) {
  const auto b = query.size(0), h = query.size(1), l = query.size(2);
  return empty_on_device({b, h, l, width}, {l * h * width, width, h * width, 1},
                         query.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attend(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
       double dropout, bool causal, bool, std::optional<double> scale) {
  count("kernels");
  const auto b = query.size(0), h = query.size(1), l = query.size(2);
  Tensor out = like_result(query, value.size(3));
  const auto exact = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  Tensor sums = empty_on_device({b, h, l}, {h * l, 1, h}, exact);
  auto work = [q = host_view(query), k = host_view(key), v = host_view(value),
               m = mask_view(mask), out = host_view(out), sums = host_view(sums), dropout, causal,
               scale]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [o, s] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, m,
                                                                  scale);
    out.copy_(o);
    sums.copy_(s);
  };
  enqueue(current_stream(), std::move(work),
          cost_of("attention", "aten::_scaled_dot_product_fused_attention_overrideable",
                  {query, key}, bytes({query, key, value}), bytes({out, sums})));
  const auto none = [] { return empty_on_device({0}, {1}, at::kLong); };
  return {out,    sums,   none(), none(), query.sym_size(2), key.sym_size(2),
          none(), none(), none()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attend_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&,
    const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&,
    const Tensor&, std::optional<double> scale) {
  count("kernels");
  Tensor dq = like_result(query, query.size(3)), dk = like_result(key, key.size(3));
  Tensor dv = like_result(value, value.size(3));
  auto work = [g = host_view(gradient), q = host_view(query), k = host_view(key),
               v = host_view(value), m = mask.defined() ? Mask(host_view(mask)) : std::nullopt,
               o = host_view(out), s = host_view(sums), dq = host_view(dq), dk = host_view(dk),
               dv = host_view(dv), dropout, causal, scale]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [a, b, c] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        g, q, k, v, o, s, dropout, causal, m, scale);
    dq.copy_(a);
    dk.copy_(b);
    dv.copy_(c);
  };
  enqueue(current_stream(), std::move(work),
          cost_of("attention_backward",
                  "aten::_scaled_dot_product_fused_attention_overrideable_backward",
                  {gradient, query, key}, bytes({gradient, query, key, value, out, sums}),
                  bytes({dq, dk, dv})));
  return {dq, dk, dv, Tensor()};
}

// As the CPU's kernel, whose mask depends on the generator alone.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || !input.numel())
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0. : 1. / (1. - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_sdp_choice", &choose);
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attend);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attend_backward);
  m.impl("native_dropout", &dropout);
}

}  // namespace simdev

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simdev::choose)
}
