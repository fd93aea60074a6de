// Memory of the device, NaN until it is written, and pinned memory of the host; copies between them that arrive late.
#include "apart.h"

#include <cstdlib>
#include <cstring>

namespace apart {

Counts counts;
std::recursive_mutex guard;
std::function<void(const char*)> on_wait;

void count_wait(const char* reason) {
  {
    std::lock_guard<std::recursive_mutex> lock(guard);
    counts.waits++;
  }
  if (on_wait) on_wait(reason);
}

namespace {

struct ToHost {
  int stream;
  uint64_t time;
  std::function<void()> copy;
};
std::vector<ToHost> to_host;   // copies under way
std::set<Block*> awaited;      // blocks with copies under way
std::map<const void*, size_t> pinned;
// By stream: what others did last to memory that was allocated on it and is free again, and so may be handed out anew.
std::map<int, std::map<int, uint64_t>> free_memory;

void* allocate_bytes(size_t bytes) {
  void* data = nullptr;
  TORCH_CHECK(!posix_memalign(&data, 64, std::max<size_t>(bytes, 64)), "npu: out of memory");
  return data;
}

void free_block(void* context) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto* block = (Block*)context;
  auto leave = [&](int stream, uint64_t time) {
    auto& last = free_memory[block->owner][stream];
    if (!block->recorded.count(stream)) last = std::max(last, time);
  };
  leave(block->writer, block->written);
  for (auto [stream, time] : block->read) leave(stream, time);
  awaited.erase(block);
  counts.device -= block->bytes;
  std::free(block->data);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    auto device = c10::impl::VirtualGuardImpl(NPU).getDevice();
    auto stream = current_stream(device.index());
    for (auto [other, time] : free_memory[stream])
      TORCH_CHECK(is_known(stream, other, time), "npu: memory of stream ", stream, " that is free again is still used by ",
                  "stream ", other, ", which has not been waited for");
    free_memory[stream].clear();
    auto* block = new Block{allocate_bytes(bytes), bytes, device, stream, stream, 0};
    std::memset(block->data, 0xFF, bytes);  // NaN in every floating-point type
    counts.device += bytes;
    counts.most_device = std::max(counts.most_device, counts.device);
    return {block->data, block, &free_block, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

void free_pinned(void* data) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  counts.pinned -= pinned[data];
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(guard);
    void* data = allocate_bytes(bytes);
    pinned[data] = bytes;
    counts.pinned += bytes;
    counts.most_pinned = std::max(counts.most_pinned, counts.pinned);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

DeviceMemory device_allocator;
PinnedMemory pinned_allocator;
REGISTER_ALLOCATOR(NPU, &device_allocator)

}  // namespace

c10::Allocator* device_memory() { return &device_allocator; }
c10::Allocator* pinned_memory() { return &pinned_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  return pinned.count(data);
}

Block* block_of(const at::Tensor& tensor) { return (Block*)tensor.storage().data_ptr().get_context(); }

void touch(const at::Tensor& tensor, int stream, uint64_t time, bool writes, const std::string& who) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  auto* block = block_of(tensor);
  auto check = [&](int other, uint64_t its_time, const char* does) {
    TORCH_CHECK(is_known(stream, other, its_time), "npu: ", who, " on stream ", stream, writes ? " writes" : " reads",
                " a tensor of shape ", tensor.sizes(), " that stream ", other, " ", does, ", and has not waited for it");
  };
  check(block->writer, block->written, "writes");
  if (writes) {
    for (auto [other, its_time] : block->read) check(other, its_time, "reads");
    block->read.clear();
    block->writer = stream;
    block->written = time;
  } else {
    block->read[stream] = time;
  }
  arrive(block);
}

void copy_later(const at::Tensor& to, std::function<void()> copy) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  block_of(to)->late.push_back(std::move(copy));
  awaited.insert(block_of(to));
}

void arrive(Block* block) {
  if (block->late.empty()) return;
  awaited.erase(block);
  for (auto& copy : std::exchange(block->late, {})) copy();
}

void deliver_to_host_at(int stream, uint64_t time, std::function<void()> copy) {
  std::lock_guard<std::recursive_mutex> lock(guard);
  to_host.push_back({stream, time, std::move(copy)});
}

void deliver() {
  for (auto* block : std::set<Block*>(awaited))
    if (is_known_to_host(block->writer, block->written)) arrive(block);
  for (auto& [stream, time, copy] : std::exchange(to_host, {}))
    if (is_known_to_host(stream, time)) copy();
    else to_host.push_back({stream, time, std::move(copy)});
}

}  // namespace apart
