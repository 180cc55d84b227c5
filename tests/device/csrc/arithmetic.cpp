// What products cost.
#include <ATen/core/Tensor.h>

#include "operators.h"

namespace simdev {
namespace {

using Arguments = std::vector<c10::IValue>;

double count_of(const at::Tensor& tensor) { return double(tensor.numel()); }

// Products of matrices a and b, batched or not.
double matrices(const at::Tensor& a, const at::Tensor& b) {
  return 2 * count_of(a) * double(b.size(-1));
}

// Of a forward convolution; each of the two backward products costs the same.
double convolution(const at::Tensor& shorter, const at::Tensor& weight) {
  return 2 * count_of(shorter) * count_of(weight) / double(weight.size(0));
}

double convolution_forward(const Arguments& given) {
  const at::Tensor input = given[0].toTensor(), weight = given[1].toTensor();
  if (given[6].toBool()) return convolution(input, weight);
  // Each output element is a product with one filter.
  const auto stride = given[3].toIntVector(), padding = given[4].toIntVector();
  const auto dilation = given[5].toIntVector();
  double elements = double(input.size(0)) * double(weight.size(0));
  for (int64_t i = 2; i < input.dim(); ++i) {
    const auto at = [&](const std::vector<int64_t>& v) { return v[v.size() == 1 ? 0 : i - 2]; };
    const int64_t reach = at(dilation) * (weight.size(i) - 1) + 1;
    elements *= double((input.size(i) + 2 * at(padding) - reach) / at(stride) + 1);
  }
  return 2 * elements * count_of(weight) / double(weight.size(0));
}

double convolution_backward(const Arguments& given) {
  const at::Tensor gradient = given[0].toTensor(), input = given[1].toTensor();
  const at::Tensor weight = given[2].toTensor();
  const bool transposed = given[6].toBool();
  const auto wanted = given[9].toBoolList();
  return convolution(transposed ? input : gradient, weight) * (int(wanted[0]) + int(wanted[1]));
}

// The score matrix times the head's width, once per product.
double attention(const at::Tensor& query, const at::Tensor& key, int products) {
  return 2.0 * products * count_of(query) * double(key.size(-2));
}

}  // namespace

double operations_of(const std::string& name, const Arguments& given) {
  const auto tensor = [&](size_t i) { return given[i].toTensor(); };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::dot" || name == "aten::mv")
    return name == "aten::mm" || name == "aten::bmm" ? matrices(tensor(0), tensor(1))
                                                     : 2 * count_of(tensor(0));
  if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmm_")
    return matrices(tensor(1), tensor(2));
  if (name == "aten::convolution_overrideable") return convolution_forward(given);
  if (name == "aten::convolution_backward_overrideable") return convolution_backward(given);
  if (name == "aten::_scaled_dot_product_fused_attention_overrideable")
    return attention(tensor(0), tensor(1), 2);
  if (name == "aten::_scaled_dot_product_fused_attention_overrideable_backward")
    return attention(tensor(1), tensor(2), 5);  // recomputes the scores
  return 0;
}

}  // namespace simdev
