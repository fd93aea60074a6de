// What PyTorch and Python ask the device for.
#include "apart.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace apart {

c10::intrusive_ptr<c10d::Backend> hccl_over(c10::intrusive_ptr<c10d::Backend> gloo);

namespace {

c10::impl::VirtualGuardImpl devices() { return c10::impl::VirtualGuardImpl(NPU); }
c10::DeviceIndex or_current(c10::DeviceIndex index) { return index < 0 ? devices().getDevice().index() : index; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { devices().setDevice({NPU, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return or_current(-1); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return devices().exchangeDevice({NPU, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  at::Device getDeviceFromPtr(void*) const override { return devices().getDevice(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(or_current(index)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage, bytes);
  }
};

void reset() {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto device = counts.device, pinned = counts.pinned;
  counts = Counts{};
  counts.device = counts.most_device = device;
  counts.pinned = counts.most_pinned = pinned;
}

void tell_waits(py::object function) {
  on_wait = function.is_none() ? std::function<void(const char*)>() : [function](const char* reason) {
    py::gil_scoped_acquire held;
    function(reason);
  };
}

}  // namespace

PYBIND11_MODULE(mock_accelerator, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::module_::import("torch.distributed");
  m.def("device_count", &device_count);
  m.def("current_device", [] { return (int)or_current(-1); });
  m.def("exchange_device", [](int index) { return (int)hooks.exchangeDevice(index); });
  m.def("default_generator", [](int index) { return hooks.getDefaultGenerator(index); });
  m.def("hccl_over", &hccl_over);
  m.def("reset", &reset);
  m.def("tell_waits", &tell_waits);
  py::class_<Counts>(m, "Counts")
      .def_readonly("operators", &Counts::operators)
      .def_readonly("waits", &Counts::waits)
      .def_readonly("bytes_to_device", &Counts::to_device)
      .def_readonly("bytes_to_host", &Counts::to_host)
      .def_readonly("device_bytes", &Counts::device)
      .def_readonly("most_device_bytes", &Counts::most_device)
      .def_readonly("pinned_bytes", &Counts::pinned)
      .def_readonly("most_pinned_bytes", &Counts::most_pinned);
  m.def("counts", [] {
    std::lock_guard<std::recursive_mutex> lock(guard);
    return Counts(counts);
  });
}

}  // namespace apart
