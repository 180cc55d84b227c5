// Collectives of device tensors.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simdev {

// A backend of torch.distributed that moves device tensors by way of a backend for the host.
c10::intrusive_ptr<c10d::Backend> make_group(const c10::intrusive_ptr<c10d::Backend>& host,
                                             int rank, int size);

}  // namespace simdev
