"""What ``nn``, ``ops``, ``runtime`` and ``optim`` must offer, whatever the framework; a test checks each of them.

Semantics are PyTorch's. Tensors keep the dtype of their inputs; comparisons give booleans.
"""

NN = {
    "Module": "base class; forward(), add by attribute, state-dict keys are dotted attribute names",
    "CALLED": "name of the method that runs when a module is called",
    "ModuleList": "list of modules, keys 0, 1, ...",
    "Sequential": "modules called in turn, keys 0, 1, ...",
    "Linear": "(in, out, bias=True); weight (out, in), bias (out,)",
    "Conv2d": "(in, out, kernel_size, stride=1, padding=0); weight (out, in, k, k), bias (out,)",
    "Embedding": "(rows, width); weight (rows, width)",
    "LayerNorm": "(width, eps=, elementwise_affine=): over the last axis; affine: weight (width,), bias (width,)",
    "RMSNorm": "(width, eps=1e-6): x / root mean square over the last axis, times weight (width,)",
    "GroupNorm": "(groups, channels, eps=1e-5): over each group of channels of (B, C, H, W); weight (C,), bias (C,)",
    "SiLU": "x * sigmoid(x)",
    "GELU": "(approximate='tanh')",
    "parameter": "(shape) -> a trained parameter, float32; its values come later",
    "frozen_parameter": "(float32 array) -> a parameter that is saved and never trained",
    "set_constant": "(module, name, array): a tensor of the module that is neither saved nor trained",
}

OPS = {
    "cat": "(tensors, dim)",
    "chunk": "(x, parts, dim) -> tuple",
    "reshape": "(x, shape)",
    "permute": "(x, axes)",
    "contiguous": "(x): the same values, in memory in the order of the axes",
    "exp": "(x)",
    "expm1": "(x): exp(x) - 1, with its digits near 0",
    "log": "(x)",
    "sigmoid": "(x): 1 / (1 + exp(-x)), with its digits near 0",
    "sin": "(x)",
    "cos": "(x)",
    "addcmul": "(x, y, z): x + y * z in one pass, with broadcasting",
    "clamp": "(x, min, max); either may be None",
    "where": "(condition, x, y); x and y tensors",
    "mean_per_sample": "(x): mean over every axis but the first -> (B,)",
    "take": "(table, index): rows of a 1-D table",
    "pad": "(x, (left, right, top, bottom)): zeros around the last two axes",
    "upsample_nearest_2x": "(x): (B, C, H, W) -> (B, C, 2H, 2W), each pixel four times",
    "attention": "(q (B, heads, N, d), k, v (B, heads, M, d), mask=None) -> softmax(q k^T / sqrt(d)) v; where a mask "
    "that broadcasts to (B, heads, N, M) is false, nothing is looked at",
    "rotary": "(x (B, heads, N, d), cos, sin (N, d / 2)): neighbours of the last axis turned as pairs, by position",
    "stop_gradient": "(x)",
    "to_float32": "(x)",
    "cast_like": "(x, y): x in the dtype of y",
    "tensor": "(array): on the runtime's device",
    "numpy": "(x) -> array, float32 for low-precision floats",
    "no_grad": "() -> context in which no gradient is recorded",
}

RUNTIME = {
    "initialize": "(backend | None, micro, global batch): join the process group, choose the device",
    "check_backend": "(name | None): refuse by name a backend that the device does not have",
    "shutdown": "(): leave the process group",
    "device_type": "() -> 'cpu', 'cuda' or 'npu'",
    "device_name": "() -> words for the log",
    "device_memory_bytes": "() -> bytes of this process's device, of the machine on a CPU; None where that is unknown",
    "WAYS_TO_BF16": "how a training step may compute in bfloat16: some of configs.precision.Way",
    "rank": "() -> rank of this process",
    "world_size": "() -> number of processes",
    "to_device": "(batch of arrays) -> batch of tensors",
    "mean_over_ranks": "(list of scalar tensors) -> list of scalar tensors",
    "read_later": "(list of scalar tensors) -> a PendingRead: their values, without waiting for them now",
    "num_microbatches": "() -> micro-batches of one optimizer step on this rank",
    "any_rank": "(bool) -> bool: true if it is true on any rank",
    "each_on_any_rank": "(list of bool) -> list of bool: each true if it is true on any rank, in one exchange",
    "barrier": "(): wait for every rank",
    "load_arrays": "(module, {name: array}): write values into the parameters of a module",
    "shapes": "(module) -> {name: shape} of its parameters",
    "to_runtime_device": "(module) -> the module on the device",
    "freeze": "(module, 'fp32' | 'bf16' = 'fp32') -> the module on the device in that precision, no longer trained",
    "low_precision": "(bool) -> context in which, if true, matrix products run in bfloat16",
    "SAMPLES_IN_BF16": "whether the two names around this one do what they are asked; if not they refuse it by name",
    "bf16_products": "(module) -> the module, weights of its linear and convolutional layers in bfloat16, or refuse",
    "allow_tf32": "(bool): whether float32 products may round their inputs to TensorFloat-32, or refuse it by name",
    "free_memory": "(): give back the device's memory that nothing uses",
    "report_failure": "(error): leave the reason where the launcher looks for it",
    "compiled": "(module) -> the module, its forward compiled where the interpreted one is slow",
    "compile_blocks": "(blocks): compile each in place for --torch-compile, or refuse it by name",
    "versions": "() -> {package: version}",
}

OPTIM = {
    "gradients": "(module, losses) -> (losses (B,), {name: gradient of their mean}); losses: () -> tensor",
    "adamw_step": "(module, losses, lr): one AdamW step on their mean, betas 0.9 and 0.999, eps 1e-8, no decay",
}
