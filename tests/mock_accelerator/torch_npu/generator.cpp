// Generators of the device: each draws what a CPU generator of its seed draws.
#include "apart.h"

#include <ATen/CPUGeneratorImpl.h>

namespace apart {
namespace {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex device, at::Generator host = at::detail::createCPUGenerator())
      : GeneratorImpl({NPU, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "npu: generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), host.clone()); }

  at::Generator host;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<DeviceGenerator>(device); }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int d = 0; d < device_count(); d++) made.push_back(new_generator(d));
    return made;
  }();
  return all.at(device);
}

at::Generator host_generator(const std::optional<at::Generator>& given, c10::Device device) {
  const auto& own = given && given->defined() ? *given : default_generator(device.index());
  TORCH_CHECK(own.device() == device, "Expected a '", device, "' generator but found one of '", own.device(), "'");
  return static_cast<DeviceGenerator*>(own.unsafeGetGeneratorImpl())->host;
}

}  // namespace apart
