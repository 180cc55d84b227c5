// Streams and events. Work is queued and runs late: when somebody waits for it, or by chance, in a
// random order that one seed repeats.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "clock.h"

namespace simdev {

constexpr StreamId kDefaultStream = 0;
constexpr StreamId kCollectives = 1;  // the stream of all process groups
constexpr StreamId kFirstStream = 2;

// A place in a stream, which an event records.
struct Moment {
  StreamId stream;
  bool passed = false;
  double at = 0;  // virtual time, since the epoch's start
  int64_t epoch = 0;
};
using MomentRef = std::shared_ptr<Moment>;

// How many tasks may wait, and how soon they run.
struct Order {
  double lateness = 0.3;  // chance that a task runs after something was queued; 1.0: at once
  size_t ahead = 3000;    // tasks that may wait before the host must work
};

// Guards everything below and the memory. Whoever holds it needs no Python: tasks hold no object
// that Python owns.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

Clock& virtual_clock();
std::map<std::string, int64_t>& counts();
void count(const std::string& name, int64_t by = 1);

StreamId current_stream();
StreamId exchange_stream(StreamId stream);
StreamId new_stream();

// Before any work is queued, and before any code is traced.
void prepare();
void enqueue(StreamId stream, std::function<void()> work, const Cost& cost);
// For the allocator's own work: it takes no time, and nothing else runs meanwhile.
void append(StreamId stream, std::function<void()> work);
// After all these moments, in a queue of its own.
void append_after(const std::vector<MomentRef>& moments, std::function<void()> work);
MomentRef record(StreamId stream);
MomentRef mark(StreamId stream);  // as record, for the allocator
void wait(StreamId stream, const MomentRef& moment);
bool query(StreamId stream);
bool query(const MomentRef& moment);

// The host waits, as it would on a card: counted by cause.
void host_waits(StreamId stream, const char* cause);
void host_waits(const MomentRef& moment, const char* cause);
void host_waits_for_all(const char* cause);
// Called with the cause whenever the host waits; nullptr for nothing.
void watch_waits(std::function<void(const char*)> watcher);
// Work runs now although no card would make the host wait for it.
void drain(StreamId stream, const std::string& why);

// All work runs, uncounted.
void settle();
void seed_order(uint64_t seed, Order order);
bool inside_task();

}  // namespace simdev
