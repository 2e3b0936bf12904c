// The device's random numbers: a state of (seed, offset) in 16 bytes, which is how DTensor's RNG tracker reads a state.
// Each random operation gets a fresh CPU generator that is mixed from both, and moves the offset on.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>
#include <map>
#include <mutex>

namespace standin {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
namespace py = pybind11;

constexpr auto kNeuron = c10::DeviceType::PrivateUse1;
DeviceIndex device_count = 1;
thread_local DeviceIndex current_device = 0;

DeviceIndex checked(DeviceIndex i) {  // -1 is the current device
  TORCH_CHECK(i < device_count, "neuron stand-in: there is no device ", int(i), ", only ", int(device_count));
  return i < 0 ? current_device : i;
}

struct Generator final : c10::GeneratorImpl {
  uint64_t seed_value = c10::default_rng_seed_val, offset = 0;

  explicit Generator(DeviceIndex i)
      : GeneratorImpl(Device(kNeuron, i), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_value = seed;
    offset = 0;
  }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_value;
  }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::kByte);
    memcpy(state.data_ptr(), &seed_value, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "neuron stand-in: an RNG state is 16 bytes on the CPU");
    memcpy(&seed_value, state.data(), 8);
    memcpy(&offset, static_cast<const char*>(state.data()) + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_value = seed_value;
    copy->offset = offset;
    return copy;
  }
  at::Generator next() {
    uint64_t z = seed_value + 0x9e3779b97f4a7c15ull * (offset + 1);  // SplitMix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    offset += 4;  // DTensor wants multiples of 4
    return at::detail::createCPUGenerator(z ^ (z >> 31));
  }
};

const at::Generator& default_generator(DeviceIndex i) {
  static std::mutex mutex;
  static std::map<DeviceIndex, at::Generator> generators;
  i = checked(i);
  std::lock_guard<std::mutex> lock(mutex);
  at::Generator& generator = generators[i];
  if (!generator.defined()) generator = at::make_generator<Generator>(i);
  return generator;
}
}  // namespace standin
