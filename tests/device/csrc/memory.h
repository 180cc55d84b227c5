// Memory of the device, which the host cannot touch, and page-locked memory of the host.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "queue.h"

namespace simdev {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
inline c10::Device device() { return c10::Device(kType, 0); }

// Where kernels find the memory of a device address.
void* reach(const void* address);
bool on_device(const at::Tensor& tensor);
// The tensor as kernels see it. It owns nothing: the memory lives by the allocator's rules.
at::Tensor host_view(const at::Tensor& tensor);
// A new tensor on the device.
at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

c10::DeviceAllocator& device_allocator();
void record_stream(const c10::DataPtr& data, StreamId stream);
void set_limit(size_t bytes);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);
// Say that a copy on a stream uses the memory, until the result is gone.
std::shared_ptr<void> use_pinned(const void* address, StreamId stream);
void register_pinned(const void* address, size_t bytes);
void unregister_pinned(const void* address);
const c10::CachingAllocator::Stat& pinned_figures();

void make_arena();

}  // namespace simdev
