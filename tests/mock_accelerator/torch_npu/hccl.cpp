// The collective backend "hccl": each collective runs over gloo, on a stream of its own that the caller must wait for.
#include "apart.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

namespace apart {
namespace {

using Tensors = std::vector<at::Tensor>;
using c10::intrusive_ptr;
using c10d::Work;

// Done as soon as it is made: to wait for it is to have the current stream wait for that of the collective.
struct Queued final : Work {
  Queued(c10d::OpType kind, Tensors outputs, Tensors inputs, c10::Device device)
      : Work(-1, kind), outputs_(std::move(outputs)), inputs_(std::move(inputs)) {
    auto type = c10::ListType::create(c10::TensorType::get());
    future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{device});
    future_->markCompleted(c10::IValue(outputs_));  // notes the current stream
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    future_->wait();
    inputs_.clear();  // until now no other may have their memory
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  Tensors result() override { return outputs_; }
  intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  intrusive_ptr<c10::ivalue::Future> future_;
  Tensors outputs_, inputs_;
};

Tensors on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) {
    TORCH_CHECK(is_here(tensor) && tensor.is_contiguous(), "hccl: tensors must be contiguous, and on the device");
    found.push_back(apart::on_host(tensor));
  }
  return found;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

struct Hccl final : c10d::Backend {
  explicit Hccl(intrusive_ptr<Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  bool supportsCoalescing() const override { return false; }

  // Run `meet` on our stream, behind what the caller has queued.
  template <class F>
  intrusive_ptr<Work> queue_on(c10d::OpType kind, const char* name, Tensors outputs, Tensors inputs, F&& meet) {
    const auto device = (outputs.empty() ? inputs : outputs).at(0).device();
    if (!streams_.count(device.index())) streams_[device.index()] = new_stream(device.index());
    int stream = streams_[device.index()];
    order(current_stream(device.index()), stream);
    auto time = queue(stream);
    for (const auto& tensor : inputs) touch(tensor, stream, time, false, name);
    for (const auto& tensor : outputs) touch(tensor, stream, time, true, name);
    if (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8)  // as nccl did until then; FSDP2 relied on it
      for (const auto& tensor : inputs) block_of(tensor)->recorded.insert(stream);
    {
      std::lock_guard<std::recursive_mutex> lock(guard);
      counts.operators[std::string("hccl::") + name]++;
    }
    at::NoGradGuard no_grad;
    meet();
    c10::StreamGuard ours(stream_of(stream));
    return c10::make_intrusive<Queued>(kind, std::move(outputs), std::move(inputs), device);
  }

  // gloo has no average of its own everywhere.
  template <class Options>
  bool sums_for_average(Options& options) const {
    bool is_average = options.reduceOp == c10d::ReduceOp::AVG;
    if (is_average) options.reduceOp = c10d::ReduceOp::SUM;
    return is_average;
  }
  void divide(Tensors& tensors) const { for (auto& tensor : tensors) tensor.div_(getSize()); }

  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue_on(c10d::OpType::BROADCAST, "broadcast", tensors, tensors, [&] {
      auto host = on_host(tensors);
      gloo_->broadcast(host, options)->wait();
    });
  }
  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& asked) override {
    auto options = asked;
    return queue_on(c10d::OpType::ALLREDUCE, "allreduce", tensors, tensors, [&] {
      bool is_average = sums_for_average(options);
      auto host = on_host(tensors);
      gloo_->allreduce(host, options)->wait();
      if (is_average) divide(host);
    });
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& asked) override {
    c10d::AllreduceOptions options;
    options.reduceOp = asked.reduceOp;
    return queue_on(c10d::OpType::ALLREDUCE_COALESCED, "allreduce", tensors, tensors, [&] {
      bool is_average = sums_for_average(options);
      auto host = on_host(tensors);
      for (auto& tensor : host) { Tensors one{tensor}; gloo_->allreduce(one, options)->wait(); }
      if (is_average) divide(host);
    });
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return queue_on(c10d::OpType::REDUCE, "reduce", tensors, tensors, [&] {
      auto host = on_host(tensors);
      gloo_->reduce(host, options)->wait();
    });
  }
  intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) override {
    return queue_on(c10d::OpType::ALLGATHER, "allgather", flat(outputs), inputs, [&] {
      std::vector<Tensors> out;
      for (const auto& list : outputs) out.push_back(on_host(list));
      auto in = on_host(inputs);
      gloo_->allgather(out, in, options)->wait();
    });
  }
  intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                      const c10d::AllgatherOptions& options) override {
    return queue_on(c10d::OpType::_ALLGATHER_BASE, "allgather", {output}, {input}, [&] {
      auto out = on_host(Tensors{output})[0], in = on_host(Tensors{input})[0];
      gloo_->_allgather_base(out, in, options)->wait();
    });
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& options) override {
    return queue_on(c10d::OpType::COALESCED, "allgather", outputs, inputs, [&] {
      auto out = on_host(outputs), in = on_host(inputs);
      for (size_t i = 0; i < out.size(); i++) gloo_->_allgather_base(out[i], in[i], options)->wait();
    });
  }
  intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::ReduceScatterOptions& asked) override {
    auto options = asked;
    return queue_on(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", outputs, inputs, [&] {
      bool is_average = sums_for_average(options);
      auto out = on_host(outputs), in = on_host(inputs);
      for (size_t i = 0; i < out.size(); i++) gloo_->_reduce_scatter_base(out[i], in[i], options)->wait();
      if (is_average) divide(out);
    });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& options) override {
    return queue_on(c10d::OpType::SCATTER, "scatter", outputs, flat(inputs), [&] {
      auto out = on_host(outputs);
      std::vector<Tensors> in;
      for (const auto& list : inputs) in.push_back(on_host(list));
      gloo_->scatter(out, in, options)->wait();
    });
  }
  intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& options) override {
    return queue_on(c10d::OpType::GATHER, "gather", flat(outputs), inputs, [&] {
      std::vector<Tensors> out;
      for (const auto& list : outputs) out.push_back(on_host(list));
      auto in = on_host(inputs);
      gloo_->gather(out, in, options)->wait();
    });
  }
  intrusive_ptr<Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                    std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    return queue_on(c10d::OpType::ALLTOALL_BASE, "alltoall", {output}, {input}, [&] {
      auto out = on_host(Tensors{output})[0], in = on_host(Tensors{input})[0];
      gloo_->alltoall_base(out, in, output_sizes, input_sizes, options)->wait();
    });
  }
  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& asked) override {
    auto options = asked;
    options.device_ids.clear();
    options.device.reset();
    return gloo_->barrier(options);
  }

 private:
  intrusive_ptr<Backend> gloo_;
  std::map<c10::DeviceIndex, int> streams_;
};

}  // namespace

intrusive_ptr<c10d::Backend> hccl_over(intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<Hccl>(std::move(gloo));
}

}  // namespace apart
