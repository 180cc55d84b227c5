// Virtual time. Each queued task gets a start and an end from the card's rates and from what it
// depends on: the task before it in its stream, events that the stream waits for, the host's time
// when it was queued, and the engine that executes it. All are known when a task is queued, so
// times do not depend on the random order in which tasks run.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace simdev {

using StreamId = int64_t;

// Parts of the card that work at the same time as the others, each on one task at a time.
enum class Engine { kNone, kCompute, kUpload, kDownload, kNetwork };

// What a task costs on a card.
struct Cost {
  Engine engine = Engine::kNone;
  std::string name;
  double read = 0;
  double written = 0;
  double operations = 0;  // floating point operations of products
  bool half = false;      // whether they multiply bf16 or fp16
};

// Bytes and operations per second, and seconds.
struct Rates {
  double memory = 1e12;
  double upload = 25e9;
  double download = 25e9;
  double network = 50e9;
  double half = 100e12;
  double single = 50e12;
  double latency = 2e-6;  // of each task, on its engine
  double launch = 0;      // of each task, on the host
};

struct Span {
  std::string lane;
  std::string name;
  StreamId stream;
  double start;
  double end;
  double bytes = 0;
  double operations = 0;
  std::string label;
};

// A thread of the host. Its tasks take longer than their sizes say by a factor.
struct Host {
  double now = 0;
  double work = 1;
  double copies = 1;
  std::string label;
};

// Whether the calling thread is the main one, or torch's for backward, which acts on its behalf.
bool on_main_thread();

class Clock {
 public:
  Rates rates;
  int64_t epoch = 0;  // times of an earlier one are over
  bool recording = false;
  std::vector<Span> spans;

  // Each returns the virtual time after it.
  double run(StreamId stream, const Cost& cost);
  double record(StreamId stream);
  void wait(StreamId stream, double until);
  double end_of(StreamId stream) const;
  double end_of_all() const;

  // Host time of the calling thread. Backward runs in torch's own thread, on behalf of the main
  // thread, and shares its time.
  double now() const;
  void join(double until, const std::string& why);
  void advance(double seconds, const std::string& name);
  void scale(double work, double copies, const std::string& label);
  void reset();

 private:
  double reserve(Engine engine, double from, double seconds);
  double seconds(const Cost& cost) const;
  double scaled(const Cost& cost);
  Host& host();

  std::map<StreamId, double> streams_;
  std::map<Engine, std::map<double, double>> busy_;  // disjoint intervals, end by start
  mutable std::map<int64_t, Host> hosts_;
};

}  // namespace simdev
