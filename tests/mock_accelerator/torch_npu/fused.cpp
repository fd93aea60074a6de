// Operators that PyTorch asks a device to define anew: convolution, attention, RMSNorm; and what autocast does here, as on
// a GPU.
#include "apart.h"

#include <ATen/Operators.h>
#include <ATen/SDPBackend.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <torch/library.h>

namespace apart {
namespace {

using torch::jit::Stack;

c10::OperatorHandle find(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [](Stack* arguments) { find("aten::convolution").callBoxed(arguments); });
}

void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [](Stack* arguments) {
    auto first = arguments->end() - 10;
    std::vector<int64_t> bias{first->toTensor().size(1)};
    arguments->insert(first + 3, c10::IValue(bias));
    find("aten::convolution_backward").callBoxed(arguments);
  });
}

// One kernel where the CPU has one, as is most of a GPU's attention.
int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  at::NoGradGuard no_grad;
  if (!block_of(q)) return (int64_t)at::SDPBackend::math;  // a tensor without memory (FakeTensor)
  auto there = mask ? std::optional(on_host(*mask)) : std::nullopt;
  auto choice = at::_fused_sdp_choice(on_host(q), on_host(k), on_host(v), there, dropout, is_causal, scale, enable_gqa);
  bool is_fused = choice == (int64_t)at::SDPBackend::flash_attention;
  return (int64_t)(is_fused ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

void attention(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [](Stack* arguments) {
    std::vector<c10::IValue> given(arguments->end() - 8, arguments->end());  // q k v bias dropout causal debug scale
    torch::jit::drop(*arguments, 8);
    auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        given[0].toTensor(), given[1].toTensor(), given[2].toTensor(), given[4].toDouble(), given[5].toBool(),
        given[3].to<std::optional<at::Tensor>>(), given[7].to<std::optional<double>>());
    auto none = at::empty({0}, at::kLong);
    torch::jit::push(*arguments, out, logsumexp, none, none, 0, 0, none, none, none);
  });
}

void attention_backward(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [](Stack* arguments) {  // grad q k v bias mask out logsumexp 4 x _ dropout causal 2 x _ scale
    std::vector<c10::IValue> given(arguments->end() - 17, arguments->end());
    torch::jit::drop(*arguments, 17);
    auto bias = given[4].toTensor().defined() ? std::optional(given[4].toTensor()) : std::nullopt;
    auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        given[0].toTensor(), given[1].toTensor(), given[2].toTensor(), given[3].toTensor(), given[6].toTensor(),
        given[7].toTensor(), given[12].toDouble(), given[13].toBool(), bias, given[16].to<std::optional<double>>());
    torch::jit::push(*arguments, q, k, v, at::Tensor());
  });
}

// The CPU takes the gradient of RMSNorm apart, a GPU has one kernel.
void rms_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [](Stack* arguments) {  // grad x shape rstd weight mask
    std::vector<c10::IValue> given(arguments->end() - 6, arguments->end());
    torch::jit::drop(*arguments, 6);
    auto grad = given[0].toTensor(), weight = given[4].toTensor();
    auto is_wanted = given[5].toBoolList();
    auto normed = given[1].toTensor() * given[3].toTensor();
    auto grad_normed = weight.defined() ? grad * weight : grad;
    auto along = (grad_normed * normed).mean(-1, true);
    auto of_x = (grad_normed - normed * along) * given[3].toTensor();
    auto of_weight = is_wanted[1] ? (grad * normed).sum_to_size(weight.sizes()).to(weight.scalar_type()) : at::Tensor();
    torch::jit::push(*arguments, of_x.to(grad.scalar_type()), of_weight);
  });
}

void rms_norm(const c10::OperatorHandle& op, Stack* stack) {
  run(op, stack, [&](Stack* arguments) { op.callBoxed(arguments); });
}

using torch::CppFunction;
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_fused_rms_norm", CppFunction::makeFromBoxedFunction<&rms_norm>());
  m.impl("_fused_rms_norm_backward", CppFunction::makeFromBoxedFunction<&rms_norm_backward>());
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("_scaled_dot_product_fused_attention_overrideable", CppFunction::makeFromBoxedFunction<&attention>());
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward",
         CppFunction::makeFromBoxedFunction<&attention_backward>());
}

using namespace at::autocast;
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FP32)
  AT_FORALL_PROMOTE(WIDEST)
}

}  // namespace
}  // namespace apart

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &apart::choose_attention)
}
