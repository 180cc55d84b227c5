#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <set>
#include <unordered_map>

namespace simdev {
namespace {

using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kArena = size_t(1) << 35;  // addresses; only touched pages take memory
constexpr size_t kRounding = 512;
constexpr int kPoison = 0xFF;  // NaN in every floating point type

struct Block {
  size_t offset;
  size_t bytes;
  StreamId stream;
  std::set<StreamId> used;
};

// The arena is mapped twice. Tensors hold addresses of the first mapping, which nobody may
// access: code that reads a device pointer on the host dies at once, as on a card.
char* there = nullptr;
char* here = nullptr;
size_t limit = size_t(1) << 34;
std::map<size_t, size_t> gaps;  // bytes by offset
size_t poisoned = 0;            // memory below has been in use
std::unordered_map<void*, Block> blocks;
DeviceStats figures;

// Freed memory that the stream's queued work has not reached yet: by bytes, offset and whether it is
// still free.
using Reusable = std::multimap<size_t, std::pair<size_t, std::shared_ptr<bool>>>;
std::map<StreamId, Reusable> reusable;

void add_gap(size_t offset, size_t bytes) {
  auto next = gaps.upper_bound(offset);
  if (next != gaps.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = gaps.erase(next);
  }
  if (next != gaps.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  gaps[offset] = bytes;
}

size_t take_gap(size_t bytes) {
  for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
    if (gap->second < bytes) continue;
    const size_t offset = gap->first, rest = gap->second - bytes;
    gaps.erase(gap);
    if (rest) gaps[offset + bytes] = rest;
    return offset;
  }
  TORCH_CHECK(false, "simdev: the arena of ", kArena, " bytes is full");
}

// Remove the entry, or the last one of this size; the stream's work that follows may use the memory.
std::optional<size_t> take_again(StreamId stream, size_t bytes,
                                 const std::shared_ptr<bool>& which = nullptr) {
  auto& here_free = reusable[stream];
  auto [first, last] = here_free.equal_range(bytes);
  while (first != last) {
    --last;
    if (which && last->second.second != which) continue;
    const size_t offset = last->second.first;
    *last->second.second = false;
    here_free.erase(last);
    return offset;
  }
  return std::nullopt;
}

// As in CUDA's caching allocator: later work of the stream that allocated the block may reuse it at
// once, and work of other streams is waited for only where record_stream named them.
void release(void* address) {
  if (!address) return;
  Lock lock(mutex());
  const auto found = blocks.find(address);
  if (found == blocks.end()) return;
  const Block block = found->second;
  blocks.erase(found);
  figures.allocated_bytes[0].decrease(block.bytes);
  figures.allocation[0].decrease(1);
  auto hand_back = [block] {
    figures.active_bytes[0].decrease(block.bytes);
    auto is_free = std::make_shared<bool>(true);
    reusable[block.stream].emplace(block.bytes, std::make_pair(block.offset, is_free));
    append(block.stream, [block, is_free] {
      memset(here + block.offset, kPoison, block.bytes);
      if (*is_free) {
        take_again(block.stream, block.bytes, is_free);
        add_gap(block.offset, block.bytes);
      }
    });
  };
  std::vector<MomentRef> moments;
  for (auto stream : block.used) moments.push_back(mark(stream));
  moments.empty() ? hand_back() : append_after(moments, hand_back);
}

void* allocate_block(size_t wanted) {
  Lock lock(mutex());
  if (!wanted) return nullptr;
  const size_t bytes = (wanted + kRounding - 1) / kRounding * kRounding;
  auto& held = figures.active_bytes[0];
  auto fits = [&] { return size_t(held.current) + bytes <= limit; };
  if (!fits()) host_waits_for_all("out_of_memory");
  if (!fits()) {
    ++figures.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev out of memory. Tried to allocate ", wanted,
                     " bytes; ", held.current, " of ", limit, " bytes are in use");
  }
  const auto again = take_again(current_stream(), bytes);
  const size_t offset = again ? *again : take_gap(bytes), end = offset + bytes;
  if (end > poisoned) {
    const size_t from = std::max(offset, poisoned);
    memset(here + from, kPoison, end - from);
    poisoned = end;
  }
  held.increase(bytes);
  figures.allocated_bytes[0].increase(bytes);
  figures.allocation[0].increase(1);
  blocks[there + offset] = {offset, bytes, current_stream(), {}};
  return there + offset;
}

struct OnDevice final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = allocate_block(bytes);
    return {address, address, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    host_waits_for_all("synchronize_device");
    memcpy(reach(to), reach(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream.id());
  }
  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(mutex());
    DeviceStats result = figures;
    result.reserved_bytes = figures.active_bytes;
    result.requested_bytes = figures.allocated_bytes;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    Lock lock(mutex());
    figures.allocated_bytes[0].reset_accumulated();
    figures.active_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    Lock lock(mutex());
    figures.allocated_bytes[0].reset_peak();
    figures.active_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    Lock lock(mutex());
    return {limit - std::min<size_t>(limit, figures.active_bytes[0].current), limit};
  }
};

struct Locked {
  size_t bytes;
  bool registered;
  std::set<StreamId> used;
  std::shared_ptr<void> copies = std::make_shared<int>();  // shared with those that are queued
};

std::map<const char*, Locked> locked;
c10::CachingAllocator::Stat locked_bytes;

std::map<const char*, Locked>::iterator find_locked(const void* address) {
  auto found = locked.upper_bound(static_cast<const char*>(address));
  if (found == locked.begin()) return locked.end();
  --found;
  const bool within = static_cast<const char*>(address) < found->first + found->second.bytes;
  return within ? found : locked.end();
}

// As in CUDA's caching host allocator: reused only after the copies that were queued with it.
void free_pinned(void* address) {
  Lock lock(mutex());
  const auto found = locked.find(static_cast<char*>(address));
  const Locked block = found->second;
  locked.erase(found);
  locked_bytes.decrease(block.bytes);
  std::vector<MomentRef> moments;
  for (auto stream : block.used) moments.push_back(mark(stream));
  auto last = [address, block] {
    memset(address, kPoison, block.bytes);
    free(address);
  };
  moments.empty() ? last() : append_after(moments, last);
}

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, [](void*) {}, c10::Device(c10::kCPU)};
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 4096, bytes), "simdev: no page-locked memory left");
    memset(address, kPoison, bytes);
    Lock lock(mutex());
    locked[static_cast<char*>(address)] = {bytes, false, {}};
    locked_bytes.increase(bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

}  // namespace

void make_arena() {
  const int file = memfd_create("simdev", 0);
  TORCH_CHECK(file >= 0 && !ftruncate(file, kArena), "simdev: cannot create the arena");
  auto map = [&](int access) {
    return mmap(nullptr, kArena, access, MAP_SHARED | MAP_NORESERVE, file, 0);
  };
  void* const hidden = map(PROT_NONE);
  void* const open = map(PROT_READ | PROT_WRITE);
  TORCH_CHECK(hidden != MAP_FAILED && open != MAP_FAILED, "simdev: cannot map the arena");
  there = static_cast<char*>(hidden);
  here = static_cast<char*>(open);
  close(file);
  gaps[0] = kArena;
}

void* reach(const void* address) { return here + (static_cast<const char*>(address) - there); }

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor host_view(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  const char* base = static_cast<const char*>(tensor.storage().data());
  if (!base) {
    TORCH_CHECK(!tensor.numel(), "simdev: a kernel uses a tensor whose storage is empty (",
                tensor.sizes(), ")");
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  void* memory = reach(base + tensor.storage_offset() * tensor.element_size());
  at::Tensor view = at::from_blob(memory, tensor.sizes(), tensor.strides(), [](void*) {}, options,
                                  c10::Device(c10::kCPU));
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor empty_on_device(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                           c10::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype);
}

c10::DeviceAllocator& device_allocator() {
  static auto* instance = new OnDevice();
  return *instance;
}

void record_stream(const c10::DataPtr& data, StreamId stream) {
  Lock lock(mutex());
  const auto found = blocks.find(data.get());
  if (found != blocks.end() && found->second.stream != stream) found->second.used.insert(stream);
}

void set_limit(size_t bytes) {
  Lock lock(mutex());
  limit = bytes;
}

c10::Allocator& pinned_allocator() {
  static auto* instance = new Pinned();
  return *instance;
}

bool is_pinned(const void* address) {
  Lock lock(mutex());
  return find_locked(address) != locked.end();
}

std::shared_ptr<void> use_pinned(const void* address, StreamId stream) {
  Lock lock(mutex());
  const auto found = find_locked(address);
  if (found == locked.end()) return nullptr;
  found->second.used.insert(stream);
  return found->second.copies;
}

void register_pinned(const void* address, size_t bytes) {
  Lock lock(mutex());
  TORCH_CHECK(find_locked(address) == locked.end(), "simdev: the memory is already page-locked");
  locked[static_cast<const char*>(address)] = {bytes, true, {}};
}

void unregister_pinned(const void* address) {
  Lock lock(mutex());
  const auto found = locked.find(static_cast<const char*>(address));
  TORCH_CHECK(found != locked.end() && found->second.registered,
              "simdev: the memory has not been registered");
  TORCH_CHECK(found->second.copies.use_count() == 1,
              "simdev: memory is unregistered while copies that use it are queued");
  locked.erase(found);
}

const c10::CachingAllocator::Stat& pinned_figures() { return locked_bytes; }

}  // namespace simdev
