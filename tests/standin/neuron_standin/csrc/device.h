// The device: guard, streams and events, memory, pinned memory, hooks. Device memory is host memory, and everything is
// synchronous: a stream is a number, an event the time at which it was recorded.
#pragma once
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>
#include <chrono>
#include <map>
#include <mutex>
#include "generator.h"

namespace standin {
constexpr size_t kMemoryBytes = size_t(24) << 30;  // a logical core of Trainium2 (AWS, "Trainium2 architecture")

thread_local std::map<DeviceIndex, c10::StreamId> current_stream;
std::atomic<int64_t> next_stream{1};

// What Python hears of; it keeps count and may refuse (rules.py).
// touch(process that used the device first, or 0): before this process uses it for the first time
// operation(name, [(argument, tensor)], {argument: text of what is no tensor}, is it a view): before an operation
// result(name, [tensor], is it a view): after it
py::object *on_touch, *on_operation, *on_result;

std::atomic<pid_t> owner{0};
void touch() {
  if (owner == getpid()) return;
  py::gil_scoped_acquire gil;
  (*on_touch)(owner.load());
  pid_t nobody = 0;
  owner.compare_exchange_strong(nobody, getpid());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kNeuron; }
  Device getDevice() const override { return Device(kNeuron, current_device); }
  void setDevice(Device d) const override { current_device = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  Stream getStream(Device d) const override {
    DeviceIndex i = checked(d.index());
    return Stream(Stream::UNSAFE, Device(kNeuron, i), current_stream[i]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, Device(kNeuron, checked(d.index()))); }
  Stream getNewStream(Device d, int = 0) const override {
    touch();
    return Stream(Stream::UNSAFE, Device(kNeuron, checked(d.index())), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    touch();
    if (!*event) *event = new double;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    *static_cast<double*>(*event) = std::chrono::duration<double, std::milli>(now).count();
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override { touch(); }
  void synchronizeDevice(const DeviceIndex) const override { touch(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Counts what is alive. A block of the host becomes device memory by `adopt`; nothing is copied.
struct Allocator final : c10::DeviceAllocator {
  struct Block {
    c10::DataPtr host;
    DeviceIndex device;
    int64_t bytes;
  };
  std::mutex mutex;
  std::map<DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats;

  void count(DeviceIndex device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto* stat : {&stats[device].allocated_bytes[0], &stats[device].reserved_bytes[0]})
      bytes >= 0 ? stat->increase(bytes) : stat->decrease(-bytes);
  }
  c10::DataPtr adopt(c10::DataPtr host, size_t bytes, DeviceIndex device);
  c10::DataPtr allocate(size_t bytes) override {
    touch();
    return adopt(c10::GetCPUAllocator()->allocate(bytes), bytes, current_device);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex i) override { return stats[i]; }
  void resetAccumulatedStats(DeviceIndex i) override { stats[i].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex i) override {
    stats[i].allocated_bytes[0].reset_peak();
    stats[i].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex i) override {
    return {kMemoryBytes - stats[i].allocated_bytes[0].current, kMemoryBytes};
  }
};
Allocator* allocator = new Allocator;  // never freed: tensors may outlive everything else

c10::DataPtr Allocator::adopt(c10::DataPtr host, size_t bytes, DeviceIndex device) {
  void* data = host.get();
  count(device, bytes);
  auto free = [](void* pointer) {
    auto* block = static_cast<Block*>(pointer);
    allocator->count(block->device, -block->bytes);
    delete block;
  };
  return {data, new Block{std::move(host), device, int64_t(bytes)}, free, Device(kNeuron, device)};
}

// Ordinary host memory that remembers that it was asked for as pinned.
struct PinnedAllocator final : c10::Allocator {
  struct Block {
    c10::DataPtr host;
    PinnedAllocator* owner;
  };
  std::mutex mutex;
  std::map<const char*, size_t> live;

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = static_cast<char*>(host.get());
    std::lock_guard<std::mutex> lock(mutex);
    live[data] = bytes;
    auto free = [](void* pointer) {
      auto* block = static_cast<Block*>(pointer);
      {
        std::lock_guard<std::mutex> lock(block->owner->mutex);
        block->owner->live.erase(static_cast<char*>(block->host.get()));
      }
      delete block;
    };
    return {data, new Block{std::move(host), this}, free, Device(c10::kCPU)};
  }
  bool owns(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex);
    auto* data = static_cast<const char*>(pointer);
    auto after = live.upper_bound(data);
    if (after == live.begin()) return false;
    auto block = std::prev(after);
    return data < block->first + block->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator* pinned_allocator = new PinnedAllocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex i) const override {
    touch();
    current_device = checked(i);
  }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    DeviceIndex old = current_device;
    current_device = checked(i);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    py::gil_scoped_acquire gil;
    (*on_operation)("torch.Generator", py::list(), py::dict(py::arg("generator") = "random"), false);
    return at::make_generator<Generator>(checked(i));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return pinned_allocator->owns(pointer); }
  Device getDeviceFromPtr(void*) const override { return Device(kNeuron, current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {  // FSDP2 frees weights by it
    c10::DataPtr fresh = allocator->adopt(c10::GetCPUAllocator()->allocate(bytes), bytes, storage.device().index());
    if (size_t kept = std::min(bytes, storage.nbytes())) memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};
}  // namespace standin
