// Any operator on the device, by its kernel for the CPU.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace simdev {

void call_on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Floating point operations of a product, from its shapes; 0 for other operators.
double operations_of(const std::string& name, const std::vector<c10::IValue>& arguments);

}  // namespace simdev
