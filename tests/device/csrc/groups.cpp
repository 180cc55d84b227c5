#include "groups.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

#include <utility>

#include "memory.h"

namespace simdev {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using WorkRef = c10::intrusive_ptr<Work>;

// As with NCCL, waiting makes the current stream wait, not the host.
class Queued final : public Work {
 public:
  Queued(c10d::OpType kind, MomentRef done, Tensors outputs)
      : Work(-1, kind), done_(std::move(done)), outputs_(std::move(outputs)) {
    const auto list = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(list, std::vector<c10::Device>{device()});
    const StreamId before = exchange_stream(kCollectives);
    future_->markCompleted(c10::IValue(outputs_));
    exchange_stream(before);
  }
  bool isCompleted() override { return query(done_); }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return outputs_; }
  void synchronize() override { simdev::wait(current_stream(), done_); }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  MomentRef done_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Device tensors of one collective, and their copies on the host.
//
// Ranks are processes, and each queue runs only when its own host waits. So that no rank waits for
// another's queue, the exchange happens at once, and only its results come late: a program that
// does not wait for the collective reads what was there before.
class Exchange {
 public:
  explicit Exchange(const char* name) : name_(name), caller_(current_stream()) {
    drain(caller_, std::string("collective ") + name);
  }

  Tensor in(const Tensor& tensor) {
    check(tensor);
    read_ += double(tensor.nbytes());
    used_.push_back(tensor);
    return host_view(tensor).clone(at::MemoryFormat::Contiguous);
  }
  Tensor out(const Tensor& tensor) {
    Tensor host = in(tensor);
    pairs_.emplace_back(tensor, host);
    return host;
  }
  Tensors in(const Tensors& tensors) {
    return each(tensors, [this](const Tensor& t) { return in(t); });
  }
  Tensors out(const Tensors& tensors) {
    return each(tensors, [this](const Tensor& t) { return out(t); });
  }
  Lists in(const Lists& lists) {
    return each(lists, [this](const Tensors& list) { return in(list); });
  }
  Lists out(const Lists& lists) {
    return each(lists, [this](const Tensors& list) { return out(list); });
  }

  WorkRef finish(const WorkRef& work, c10d::OpType kind, double factor = 1) {
    work->wait();
    count("collectives");
    wait(kCollectives, record(caller_));
    Tensors outputs;
    std::vector<std::pair<Tensor, Tensor>> views;
    double written = 0;
    for (auto& [tensor, host] : pairs_) {
      if (factor != 1) host.mul_(factor);
      views.emplace_back(host_view(tensor), host);
      outputs.push_back(tensor);
      written += double(tensor.nbytes());
    }
    for (auto& tensor : used_) record_stream(tensor.storage().data_ptr(), kCollectives);
    auto deliver = [views]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      for (auto& [to, from] : views) to.copy_(from);
    };
    enqueue(kCollectives, deliver, {Engine::kNetwork, name_, read_, written});
    return c10::make_intrusive<Queued>(kind, record(kCollectives), outputs);
  }

 private:
  template <class List, class F>
  static List each(const List& from, F f) {
    List to;
    for (const auto& element : from) to.push_back(f(element));
    return to;
  }
  void check(const Tensor& tensor) const {
    TORCH_CHECK(on_device(tensor), name_, ": expected tensors on ", device(), ", but got one on ",
                tensor.device());
  }

  const char* name_;
  StreamId caller_;
  double read_ = 0;
  Tensors used_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

// Gloo has no average.
template <class Options>
std::pair<Options, double> as_sum(Options options, int size) {
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  if (average) options.reduceOp = c10d::ReduceOp::SUM;
  return {options, average ? 1.0 / size : 1.0};
}

class Group final : public Backend {
 public:
  Group(c10::intrusive_ptr<Backend> host, int rank, int size)
      : Backend(rank, size), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkRef endCoalescing() override {
    return c10::make_intrusive<Queued>(c10d::OpType::COALESCED, record(kCollectives), Tensors());
  }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Exchange exchange("broadcast");
    auto host = exchange.out(tensors);
    return exchange.finish(host_->broadcast(host, options), c10d::OpType::BROADCAST);
  }
  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Exchange exchange("allreduce");
    auto host = exchange.out(tensors);
    const auto [sum, factor] = as_sum(options, getSize());
    return exchange.finish(host_->allreduce(host, sum), c10d::OpType::ALLREDUCE, factor);
  }
  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    for (size_t i = 0; i + 1 < tensors.size(); ++i) one_allreduce(tensors[i], options);
    return one_allreduce(tensors.back(), options);
  }
  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    Exchange exchange("reduce");
    auto host = exchange.out(tensors);
    const auto [sum, factor] = as_sum(options, getSize());
    return exchange.finish(host_->reduce(host, sum), c10d::OpType::REDUCE, factor);
  }
  WorkRef allgather(Lists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    Exchange exchange("allgather");
    auto out = exchange.out(outputs);
    auto in = exchange.in(inputs);
    return exchange.finish(host_->allgather(out, in, options), c10d::OpType::ALLGATHER);
  }
  WorkRef _allgather_base(Tensor& output, Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Exchange exchange("allgather");
    auto out = exchange.out(output), in = exchange.in(input);
    return exchange.finish(host_->_allgather_base(out, in, options),
                           c10d::OpType::_ALLGATHER_BASE);
  }
  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i + 1 < outputs.size(); ++i)
      _allgather_base(outputs[i], inputs[i], options);
    return _allgather_base(outputs.back(), inputs.back(), options);
  }
  WorkRef gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Exchange exchange("gather");
    auto out = exchange.out(outputs);
    auto in = exchange.in(inputs);
    return exchange.finish(host_->gather(out, in, options), c10d::OpType::GATHER);
  }
  WorkRef scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    Exchange exchange("scatter");
    auto out = exchange.out(outputs);
    auto in = exchange.in(inputs);
    return exchange.finish(host_->scatter(out, in, options), c10d::OpType::SCATTER);
  }
  WorkRef reduce_scatter(Tensors& outputs, Lists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    Exchange exchange("reduce_scatter");
    auto out = exchange.out(outputs);
    auto in = exchange.in(inputs);
    const auto [sum, factor] = as_sum(options, getSize());
    return exchange.finish(host_->reduce_scatter(out, in, sum), c10d::OpType::REDUCE_SCATTER,
                           factor);
  }
  WorkRef _reduce_scatter_base(Tensor& output, Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Exchange exchange("reduce_scatter");
    auto out = exchange.out(output), in = exchange.in(input);
    const auto [sum, factor] = as_sum(options, getSize());
    return exchange.finish(host_->_reduce_scatter_base(out, in, sum),
                           c10d::OpType::_REDUCE_SCATTER_BASE, factor);
  }
  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i + 1 < outputs.size(); ++i)
      _reduce_scatter_base(outputs[i], inputs[i], options);
    return _reduce_scatter_base(outputs.back(), inputs.back(), options);
  }
  WorkRef alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    Exchange exchange("alltoall");
    auto out = exchange.out(output), in = exchange.in(input);
    return exchange.finish(host_->alltoall_base(out, in, output_sizes, input_sizes, options),
                           c10d::OpType::ALLTOALL_BASE);
  }
  WorkRef send(Tensors& tensors, int to, int tag) override {
    Exchange exchange("send");
    auto host = exchange.in(tensors);
    return exchange.finish(host_->send(host, to, tag), c10d::OpType::SEND);
  }
  WorkRef recv(Tensors& tensors, int from, int tag) override {
    Exchange exchange("recv");
    auto host = exchange.out(tensors);
    return exchange.finish(host_->recv(host, from, tag), c10d::OpType::RECV);
  }
  // The host waits, as with NCCL.
  WorkRef barrier(const c10d::BarrierOptions& options) override {
    host_waits(current_stream(), "synchronize_stream");
    c10d::BarrierOptions plain = options;
    plain.device_ids.clear();
    plain.device.reset();
    return host_->barrier(plain);
  }

 private:
  WorkRef one_allreduce(const Tensor& tensor, const c10d::AllreduceOptions& options) {
    Tensors one{tensor};
    return allreduce(one, options);
  }

  c10::intrusive_ptr<Backend> host_;
};

}  // namespace

c10::intrusive_ptr<Backend> make_group(const c10::intrusive_ptr<Backend>& host, int rank,
                                       int size) {
  return c10::make_intrusive<Group>(host, rank, size);
}

}  // namespace simdev
