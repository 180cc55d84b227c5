// Copies between the host and the device, by the rules of cudaMemcpyAsync.
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "memory.h"

namespace simdev {
namespace {

using at::Tensor;

void copy_on_host(Tensor& to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(from);
}

void enqueue_copy(Tensor to, Tensor from, const Cost& cost,
                  std::shared_ptr<void> in_use = nullptr) {
  auto work = [to, from, in_use]() mutable { copy_on_host(to, from); };
  enqueue(current_stream(), std::move(work), cost);
}

// The host's memory by its address alone: whoever frees or changes it early is wrong on a card too.
Tensor by_address(const Tensor& host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(), [](void*) {},
                       at::TensorOptions().dtype(host.dtype()), c10::Device(c10::kCPU));
}

// Whether the driver copies these bytes itself. torch converts and rearranges others first.
bool is_late(const Tensor& host, const Tensor& on_device, bool non_blocking) {
  return non_blocking && is_pinned(host.data_ptr()) && host.dtype() == on_device.dtype() &&
         host.is_non_overlapping_and_dense() && host.strides() == on_device.strides() &&
         !host.is_conj() && !host.is_neg();
}

void on_device_copy(const Tensor& from, const Tensor& to) {
  count("copies_on_device");
  enqueue_copy(host_view(to), host_view(from),
               {Engine::kCompute, "copy", double(from.nbytes()), double(to.nbytes())});
}

void upload(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool late = is_late(from, to, non_blocking);
  Tensor source;
  std::shared_ptr<void> in_use;
  if (late) {
    source = by_address(from);
    in_use = use_pinned(from.data_ptr(), current_stream());
  } else {
    // Staged: the host may change its tensor at once.
    source = at::empty_like(from, from.options().dtype(to.dtype()).requires_grad(false));
    copy_on_host(source, from.detach());
  }
  count("uploads");
  count("upload_bytes", to.nbytes());
  Cost cost{Engine::kUpload, "upload", 0, double(to.nbytes())};
  enqueue_copy(host_view(to), source, cost, in_use);
  if (!non_blocking) {
    host_waits(current_stream(), "blocking_upload");
  } else if (!late) {
    count("uploads_from_pageable");
  }
}

void download(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool late = is_late(to, from, non_blocking);
  const auto in_use = late ? use_pinned(to.data_ptr(), current_stream()) : nullptr;
  count("downloads");
  count("download_bytes", from.nbytes());
  Cost cost{Engine::kDownload, "download", double(from.nbytes()), 0};
  enqueue_copy(by_address(to), host_view(from), cost, in_use);
  if (!late) host_waits(current_stream(), "blocking_download");
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!to.numel()) return to;
  // The source may be broadcast, which the queue's kernels do too.
  if (on_device(self) && on_device(to)) {
    on_device_copy(self, to);
  } else if (on_device(to)) {
    upload(self.expand_as(to), to, non_blocking);
  } else {
    download(self.expand_as(to), to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  host_waits(current_stream(), "item");
  return host_view(self).item();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// Copies read and write conjugate and negative tensors themselves; torch would copy them first,
// with this operator.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace simdev
