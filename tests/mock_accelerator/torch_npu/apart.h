// What the files of this device share. PyTorch calls a device of another package PrivateUse1; ours is named "npu".
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace apart {

constexpr auto NPU = c10::DeviceType::PrivateUse1;
int device_count();

// --- Order: what one stream knows of the others (streams.cpp) ---

// By stream, how much of its work is known to be done.
using Clock = std::vector<uint64_t>;

int current_stream(c10::DeviceIndex device);
int new_stream(c10::DeviceIndex device);
c10::Stream stream_of(int number);
// Start an operator on a stream; returns its time there.
uint64_t queue(int stream);
// All that `first` has queued comes before all that `then` will queue.
void order(int first, int then);
bool is_known(int stream, int of, uint64_t time);
bool is_known_to_host(int of, uint64_t time);
// The host waits for what is queued on a stream, or on every stream of a device.
void wait_for_stream(int stream);
void wait_for_device(c10::DeviceIndex device);

// --- Memory: blocks that only the device may read (memory.cpp) ---

struct Block {
  void* data;
  size_t bytes;
  c10::Device device;
  int owner;  // stream that it was allocated on
  int writer;
  uint64_t written;
  std::map<int, uint64_t> read;               // last read, by stream
  std::set<int> recorded;                     // record_stream: these may use it after it is freed
  std::vector<std::function<void()>> late;    // copies from the host that have not arrived
};

c10::Allocator* device_memory();
c10::Allocator* pinned_memory();
bool is_pinned(const void* data);
Block* block_of(const at::Tensor& tensor);
// Note that an operator on `stream` reads or writes a tensor; raises where another stream may still be at it.
void touch(const at::Tensor& tensor, int stream, uint64_t time, bool writes, const std::string& who);
void copy_later(const at::Tensor& to, std::function<void()> copy);
void arrive(Block* block);
void deliver();  // all that the host has waited for, both ways
void deliver_to_host_at(int stream, uint64_t time, std::function<void()> copy);

// --- Operators (operators.cpp) ---

bool is_here(const at::Tensor& tensor);
// A CPU tensor on the bytes of a device tensor: for kernels of this device alone.
at::Tensor on_host(const at::Tensor& tensor);
// A device tensor with the values of a CPU tensor that a kernel has made.
at::Tensor on_device(const at::Tensor& made, c10::Device device);
// Call an operator of the device: its kernel gets, and leaves on the stack, CPU tensors.
using Kernel = std::function<void(torch::jit::Stack*)>;
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Kernel& kernel);
void resize_bytes(const c10::Storage& storage, size_t bytes);

// --- Random numbers: those that the CPU draws (generator.cpp) ---

at::Generator new_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);
// What a kernel draws from; raises if `given` is of another device.
at::Generator host_generator(const std::optional<at::Generator>& given, c10::Device device);

// --- Counts ---

struct Counts {
  std::map<std::string, int64_t> operators;
  int64_t waits = 0, to_device = 0, to_host = 0;                    // bytes
  int64_t device = 0, most_device = 0, pinned = 0, most_pinned = 0;  // bytes
};
extern Counts counts;
extern std::recursive_mutex guard;                 // of all that is declared here; never held while ranks meet
extern std::function<void(const char*)> on_wait;  // told what the host waits for; never called while `guard` is held
void count_wait(const char* reason);

}  // namespace apart
