// What torch and Python see: the device's guard and hooks, and functions of this module.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/csrc/utils/pybind.h>

#include "groups.h"
#include "memory.h"
#include "queue.h"
#include "tensors.h"

namespace simdev {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void*) const override { return device(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

c10::Stream as_stream(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
MomentRef* moment_of(void* event) { return static_cast<MomentRef*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(kDefaultStream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(exchange_stream(stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override { return query(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(stream.id(), "synchronize_stream");
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    host_waits_for_all("synchronize_device");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (!*event) *event = new MomentRef();
    *moment_of(*event) = simdev::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait(stream.id(), *moment_of(event));
  }
  bool queryEvent(void* event) const override { return !event || query(*moment_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(*moment_of(event), "synchronize_event");
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    return ((*moment_of(second))->at - (*moment_of(first))->at) * 1e3;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete moment_of(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

const void* address_of(int64_t address) { return reinterpret_cast<const void*>(address); }

void set_rates(const std::map<std::string, double>& wanted) {
  Lock lock(mutex());
  Rates& rates = virtual_clock().rates;
  const std::map<std::string, double*> known = {
      {"memory", &rates.memory},   {"upload", &rates.upload}, {"download", &rates.download},
      {"network", &rates.network}, {"half", &rates.half},     {"single", &rates.single},
      {"latency", &rates.latency}, {"launch", &rates.launch}};
  for (const auto& [name, value] : wanted) {
    const auto found = known.find(name);
    TORCH_CHECK_VALUE(found != known.end(), "simdev: no such rate: ", name);
    *found->second = value;
  }
}

void define_memory(py::module_& m) {
  m.def("limit", &set_limit);
  m.def("pinned_memory", [] {
    Lock lock(mutex());
    const auto& figures = pinned_figures();
    return std::make_tuple(figures.current, figures.peak, figures.allocated, figures.freed);
  });
  m.def("pin", [](int64_t address, size_t bytes) { register_pinned(address_of(address), bytes); });
  m.def("unpin", [](int64_t address) { unregister_pinned(address_of(address)); });
}

void define_clock(py::module_& m) {
  m.def("clock_rates", &set_rates);
  m.def("clock_now", [] {
    Lock lock(mutex());
    return virtual_clock().now();
  });
  m.def("clock_end", [] {
    Lock lock(mutex());
    return virtual_clock().end_of_all();
  });
  m.def("clock_join", [](double until, const std::string& why) {
    Lock lock(mutex());
    virtual_clock().join(until, why);
  });
  m.def("clock_advance", [](double seconds, const std::string& name) {
    Lock lock(mutex());
    virtual_clock().advance(seconds, name);
  });
  m.def("clock_scale", [](double work, double copies, const std::string& label) {
    Lock lock(mutex());
    virtual_clock().scale(work, copies, label);
  });
  m.def("clock_record", [](bool on) {
    Lock lock(mutex());
    virtual_clock().recording = on;
  });
  m.def("clock_reset", [] {
    Lock lock(mutex());
    settle();
    virtual_clock().reset();
  });
  m.def("clock_spans", [](size_t first) {
    Lock lock(mutex());
    std::vector<std::tuple<std::string, std::string, int64_t, double, double, double, double,
                           std::string>>
        spans;
    const auto& recorded = virtual_clock().spans;
    for (size_t i = first; i < recorded.size(); ++i) {
      const auto& span = recorded[i];
      spans.emplace_back(span.lane, span.name, span.stream, span.start, span.end, span.bytes,
                         span.operations, span.label);
    }
    return spans;
  });
}

}  // namespace

PYBIND11_MODULE(simdev, m) {
  make_arena();
  prepare();
  c10::SetAllocator(kType, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("seed_order", [](uint64_t seed, double lateness, size_t ahead) {
    py::gil_scoped_release released;
    seed_order(seed, {lateness, ahead});
  });
  m.def("counts", [] {
    Lock lock(mutex());
    return counts();
  });
  m.def("reset_counts", [] {
    Lock lock(mutex());
    counts().clear();
  });
  m.def("watch_waits", [](std::optional<py::function> watcher) {
    if (!watcher) return watch_waits(nullptr);
    watch_waits([watcher = *watcher](const char* cause) {
      py::gil_scoped_acquire held;
      watcher(cause);
    });
  });
  m.def("default_generator", [] { return default_generator(); });
  m.def("make_group", &make_group);
  define_memory(m);
  define_clock(m);
}

}  // namespace simdev
