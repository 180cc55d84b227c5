#include "clock.h"

#include <sys/syscall.h>
#include <torch/csrc/autograd/graph_task.h>
#include <unistd.h>

#include <algorithm>

namespace simdev {
namespace {

constexpr int64_t kMain = 0;
constexpr size_t kIntervals = 1 << 14;

// Backward runs in threads of torch, whose names those that they start would inherit.
bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

int64_t thread_key() {
  thread_local const int64_t own = syscall(SYS_gettid);
  return own == getpid() || in_backward() ? kMain : own;
}

const char* lane_of(Engine engine) {
  switch (engine) {
    case Engine::kCompute: return "compute";
    case Engine::kUpload: return "upload";
    case Engine::kDownload: return "download";
    case Engine::kNetwork: return "network";
    default: return "none";
  }
}

}  // namespace

bool on_main_thread() { return thread_key() == kMain; }

double Clock::scaled(const Cost& cost) {
  const bool computes = cost.engine == Engine::kCompute;
  const double factor = computes ? host().work : host().copies;
  const double fixed = cost.engine == Engine::kNone ? 0 : rates.latency;
  return fixed + factor * (seconds(cost) - fixed);
}

double Clock::seconds(const Cost& cost) const {
  switch (cost.engine) {
    case Engine::kCompute:
      return rates.latency + std::max((cost.read + cost.written) / rates.memory,
                                      cost.operations / (cost.half ? rates.half : rates.single));
    case Engine::kUpload: return rates.latency + cost.written / rates.upload;
    case Engine::kDownload: return rates.latency + cost.read / rates.download;
    case Engine::kNetwork: return rates.latency + (cost.read + cost.written) / rates.network;
    default: return 0;
  }
}

// The first gap in the engine's schedule that is long enough. A task that was queued early but
// waits for long does not keep back tasks of other streams that are ready before it.
double Clock::reserve(Engine engine, double from, double seconds) {
  auto& busy = busy_[engine];
  auto next = busy.upper_bound(from);
  if (next != busy.begin() && std::prev(next)->second > from) from = std::prev(next)->second;
  while (next != busy.end() && next->first < from + seconds) {
    from = std::max(from, next->second);
    ++next;
  }
  double start = from, end = from + seconds;
  if (next != busy.begin() && std::prev(next)->second == start) {
    start = std::prev(next)->first;
    busy.erase(std::prev(next));
  }
  if (next != busy.end() && next->first == end) {
    end = next->second;
    busy.erase(next);
  }
  busy[start] = end;
  if (busy.size() > kIntervals) busy.erase(busy.begin());
  return from;
}

double Clock::run(StreamId stream, const Cost& cost) {
  double& end = streams_[stream];
  Host& own = host();
  own.now += rates.launch;
  const double ready = std::max(end, own.now), length = scaled(cost);
  if (cost.engine == Engine::kNone) return end = ready;
  const double start = reserve(cost.engine, ready, length);
  end = start + length;
  if (recording)
    spans.push_back({lane_of(cost.engine), cost.name, stream, start, end, cost.read + cost.written,
                     cost.operations, own.label});
  return end;
}

double Clock::record(StreamId stream) {
  double& end = streams_[stream];
  return end = std::max(end, host().now);
}

void Clock::wait(StreamId stream, double until) {
  double& end = streams_[stream];
  end = std::max(end, until);
}

double Clock::end_of(StreamId stream) const {
  const auto found = streams_.find(stream);
  return found == streams_.end() ? 0 : found->second;
}

double Clock::end_of_all() const {
  double last = 0;
  for (const auto& [id, end] : streams_) last = std::max(last, end);
  return last;
}

Host& Clock::host() { return hosts_[thread_key()]; }
double Clock::now() const { return hosts_[thread_key()].now; }

void Clock::join(double until, const std::string& why) {
  Host& own = host();
  if (until <= own.now) return;
  if (recording) spans.push_back({"host", why, -1, own.now, until, 0, 0, own.label});
  own.now = until;
}

void Clock::advance(double seconds, const std::string& name) {
  Host& own = host();
  const double end = own.now + seconds;
  if (recording) spans.push_back({"host", name, -1, own.now, end, 0, 0, own.label});
  own.now = end;
}

void Clock::scale(double work, double copies, const std::string& label) {
  Host& own = host();
  own.work = work;
  own.copies = copies;
  own.label = label;
}

void Clock::reset() {
  streams_.clear();
  busy_.clear();
  hosts_.clear();
  spans.clear();
  ++epoch;
}

}  // namespace simdev
