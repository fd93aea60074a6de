// Streams: which work comes before which (vector clocks). Work is done when it is queued; whether a program may rely on
// that is checked at every access to memory, so that a missing wait is found whatever overtakes what.
#include "apart.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstdlib>

namespace apart {
namespace {

std::vector<Clock> clocks;  // by stream; the first ones are the default streams of the devices
std::vector<c10::DeviceIndex> devices_of_streams;
Clock host;  // what the host has waited for
thread_local c10::DeviceIndex current = 0;
thread_local std::map<c10::DeviceIndex, int> chosen;

uint64_t at(const Clock& clock, int stream) { return stream < (int)clock.size() ? clock[stream] : 0; }

void take_in(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

void know_defaults() {
  for (int d = clocks.size(); d < device_count(); d++) { clocks.emplace_back(); devices_of_streams.push_back(d); }
}

struct Event {
  int stream;
  Clock clock;
  bool was_asked = false;
};

bool is_last(const Event& event) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto time = at(event.clock, event.stream);
  return time == at(clocks[event.stream], event.stream) && !is_known_to_host(event.stream, time);
}

int number(const c10::Stream& stream) { return (int)stream.id(); }

}  // namespace

int device_count() {
  static const char* told = std::getenv("DEVICE_APART_COUNT");
  static int count = told ? std::atoi(told) : 4;
  return count;
}

c10::Stream stream_of(int number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(NPU, devices_of_streams[number]), number);
}

int new_stream(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  know_defaults();
  clocks.emplace_back();
  devices_of_streams.push_back(device);
  return clocks.size() - 1;
}

int current_stream(c10::DeviceIndex device) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  know_defaults();
  auto found = chosen.find(device);
  return found == chosen.end() ? device : found->second;
}

uint64_t queue(int stream) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto& clock = clocks[stream];
  clock.resize(std::max(clock.size(), (size_t)stream + 1));
  return ++clock[stream];
}

void order(int first, int then) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  take_in(clocks[then], Clock(clocks[first]));
}

bool is_known_to_host(int of, uint64_t time) { return at(host, of) >= time; }

bool is_known(int stream, int of, uint64_t time) {
  return stream == of || at(clocks[stream], of) >= time || is_known_to_host(of, time);
}

void wait_for_stream(int stream) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  take_in(host, clocks[stream]);
  deliver();
}

// A host that knows that all is done does not wait.
void wait_for_device(c10::DeviceIndex device) {
  bool waits = false;
  {
    std::lock_guard<std::recursive_mutex> lock(guard);
    for (int s = 0; s < (int)clocks.size(); s++)
      if (devices_of_streams[s] == device) {
        waits |= !is_known_to_host(s, at(clocks[s], s));
        take_in(host, clocks[s]);
      }
    deliver();
  }
  if (waits) count_wait("synchronize");
}

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return NPU; }
  c10::Device getDevice() const override { return {NPU, current}; }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "npu: there is no device ", (int)device.index());
    uncheckedSetDevice(device);
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
#if __has_include(<c10/core/DeviceCapability.h>)  // not in PyTorch 2.7, which MindSpeed-MM's native engine takes
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
#endif

  c10::DeviceIndex index(c10::Device device) const { return device.index() < 0 ? current : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    current_stream(index(device));
    return stream_of(index(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    chosen[stream.device_index()] = number(stream);
    return before;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (!*event) *event = new Event;
    *(Event*)*event = Event{number(stream), clocks[number(stream)]};
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (event) take_in(clocks[number(stream)], ((Event*)event)->clock);
  }
  // Not there yet when it is asked for the first time: a program must be right either way.
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (!event || std::exchange(((Event*)event)->was_asked, true)) {
      if (event) take_in(host, ((Event*)event)->clock);
      deliver();
      return true;
    }
    return false;
  }
  // The device stands idle only where nothing is queued behind the event.
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    if (is_last(*(Event*)event)) count_wait("event.synchronize");
    std::lock_guard<std::recursive_mutex> lock(guard);
    take_in(host, ((Event*)event)->clock);
    deliver();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }

  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    return is_known_to_host(number(stream), at(clocks[number(stream)], number(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("stream.synchronize");
    wait_for_stream(number(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device < 0 ? current : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    if (data.device().type() == NPU && data.get_context()) ((Block*)data.get_context())->recorded.insert(number(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace apart
