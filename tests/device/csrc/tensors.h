// What other files need of tensors and generators on the device.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace simdev {

at::Generator new_generator();
const at::Generator& default_generator();
// The host's generator that produces a device generator's numbers.
at::Generator host_generator(const at::Generator& generator);

void resize_storage(const c10::Storage& storage, size_t bytes);
at::Tensor alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                 int64_t offset, caffe2::TypeMeta dtype);
at::Tensor like_on_meta(const at::Tensor& tensor);

}  // namespace simdev
