#include "queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <deque>
#include <random>
#include <vector>

namespace simdev {
namespace {

struct Task {
  std::function<void()> work;
  MomentRef awaits;
  MomentRef signals;
};

// Only streams with work, so that their number does not grow.
std::map<StreamId, std::deque<Task>> queues;
std::mt19937_64 chance(0);
Order order;
size_t pending = 0;
StreamId last_stream = kFirstStream - 1;
StreamId last_reclaimer = -1;
std::function<void(const char*)> watcher;
thread_local StreamId current = kDefaultStream;
thread_local bool inside = false;

// How a thread dispatches that only runs kernels: it neither traces, casts nor records gradients.
const c10::impl::LocalDispatchKeySet& plain_dispatch() {
  static const auto* instance = [] {
    at::AutoDispatchBelowADInplaceOrView below;
    return new c10::impl::LocalDispatchKeySet(c10::impl::tls_local_dispatch_key_set());
  }();
  return *instance;
}

void push(StreamId stream, Task task) {
  queues[stream].push_back(std::move(task));
  ++pending;
}

bool ready(const Task& task) { return !task.awaits || task.awaits->passed; }

void run_first(StreamId stream) {
  auto& queue = queues[stream];
  Task task = std::move(queue.front());
  queue.pop_front();
  if (queue.empty()) queues.erase(stream);
  --pending;
  if (task.work) {
    // The host may do anything meanwhile, such as trace code that the work is no part of. (Setting
    // the thread's whole state would need Python's lock, whose owner may wait for this mutex.)
    const c10::impl::ForceDispatchKeyGuard plain(plain_dispatch());
    const bool before = inside;
    inside = true;
    try {
      task.work();
    } catch (...) {
      inside = before;
      throw;
    }
    inside = before;
  }
  if (task.signals) task.signals->passed = true;
}

bool run_any() {
  std::vector<StreamId> candidates;
  for (auto& [id, queue] : queues)
    if (ready(queue.front())) candidates.push_back(id);
  if (candidates.empty()) return false;
  run_first(candidates[chance() % candidates.size()]);
  return true;
}

bool by_chance(double probability) {
  return std::uniform_real_distribution<>()(chance) < probability;
}

// One task of those that the stream's next task depends on, so that all others stay late.
void run_for(StreamId stream, const std::string& why) {
  if (by_chance(order.lateness) && run_any()) return;
  for (size_t seen = 0; seen <= queues.size(); ++seen) {
    const auto queue = queues.find(stream);
    if (queue == queues.end()) break;
    const Task& task = queue->second.front();
    if (ready(task)) return run_first(stream);
    stream = task.awaits->stream;
  }
  TORCH_CHECK(false, "simdev: deadlock while the host waits (", why, ")");
}

void run_by_chance() {
  while (pending > order.ahead && run_any()) {
  }
  while (by_chance(order.lateness) && run_any()) {
  }
}

double time_of(const MomentRef& moment) {
  return moment->epoch == virtual_clock().epoch ? moment->at : 0;
}

// Waits of the training thread; other threads may wait as long as they like.
void count_wait(const std::string& cause) { count(on_main_thread() ? cause : cause + " beside"); }

void finish(StreamId stream, const std::string& why) {
  while (queues.count(stream)) run_for(stream, why);
}

}  // namespace

std::recursive_mutex& mutex() {
  static auto* instance = new std::recursive_mutex();
  return *instance;
}

Clock& virtual_clock() {
  static auto* instance = new Clock();
  return *instance;
}

std::map<std::string, int64_t>& counts() {
  static auto* instance = new std::map<std::string, int64_t>();
  return *instance;
}

void count(const std::string& name, int64_t by) {
  Lock lock(mutex());
  counts()[name] += by;
}

StreamId current_stream() { return current; }

StreamId exchange_stream(StreamId stream) {
  const StreamId before = current;
  current = stream;
  return before;
}

StreamId new_stream() {
  Lock lock(mutex());
  return ++last_stream;
}

void enqueue(StreamId stream, std::function<void()> work, const Cost& cost) {
  Lock lock(mutex());
  virtual_clock().run(stream, cost);
  push(stream, {std::move(work), nullptr, nullptr});
  run_by_chance();
}

void append(StreamId stream, std::function<void()> work) {
  Lock lock(mutex());
  push(stream, {std::move(work), nullptr, nullptr});
}

void append_after(const std::vector<MomentRef>& moments, std::function<void()> work) {
  Lock lock(mutex());
  const StreamId own = --last_reclaimer;
  for (const auto& moment : moments) push(own, {nullptr, moment, nullptr});
  push(own, {std::move(work), nullptr, nullptr});
}

MomentRef mark(StreamId stream) {
  Lock lock(mutex());
  auto moment = std::make_shared<Moment>();
  moment->stream = stream;
  push(stream, {nullptr, nullptr, moment});
  return moment;
}

MomentRef record(StreamId stream) {
  Lock lock(mutex());
  auto moment = mark(stream);
  moment->at = virtual_clock().record(stream);
  moment->epoch = virtual_clock().epoch;
  run_by_chance();
  return moment;
}

void wait(StreamId stream, const MomentRef& moment) {
  Lock lock(mutex());
  virtual_clock().wait(stream, time_of(moment));
  push(stream, {nullptr, moment, nullptr});
  run_by_chance();
}

bool query(StreamId stream) {
  Lock lock(mutex());
  run_any();
  return !queues.count(stream);
}

bool query(const MomentRef& moment) {
  Lock lock(mutex());
  run_any();
  return moment->passed;
}

void watch_waits(std::function<void(const char*)> wanted) { watcher = std::move(wanted); }

void host_waits(StreamId stream, const char* cause) {
  if (watcher) watcher(cause);
  Lock lock(mutex());
  count_wait(cause);
  finish(stream, cause);
  virtual_clock().join(virtual_clock().end_of(stream), cause);
}

void host_waits(const MomentRef& moment, const char* cause) {
  if (watcher) watcher(cause);
  Lock lock(mutex());
  count_wait(cause);
  while (!moment->passed) run_for(moment->stream, cause);
  virtual_clock().join(time_of(moment), cause);
}

void host_waits_for_all(const char* cause) {
  if (watcher) watcher(cause);
  Lock lock(mutex());
  count_wait(cause);
  while (pending) TORCH_CHECK(run_any(), "simdev: deadlock while the host waits (", cause, ")");
  virtual_clock().join(virtual_clock().end_of_all(), cause);
}

void drain(StreamId stream, const std::string& why) {
  Lock lock(mutex());
  count("drained: " + why);
  finish(stream, why);
}

void prepare() { plain_dispatch(); }

void settle() {
  Lock lock(mutex());
  while (pending) TORCH_CHECK(run_any(), "simdev: deadlock among the queued work");
}

void seed_order(uint64_t seed, Order wanted) {
  Lock lock(mutex());
  settle();
  chance.seed(seed);
  order = wanted;
}

bool inside_task() { return inside; }

}  // namespace simdev
