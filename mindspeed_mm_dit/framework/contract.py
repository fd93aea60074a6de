"""The interface of a backend, and what every backend needs: lazy imports, and how much memory the machine has."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

NN = {
    "Module": "base class; forward(), add by attribute, state-dict keys are dotted attribute names",
    "ModuleList": "list of modules, keys 0, 1, ...",
    "Blocks": "(modules): a ModuleList of a network's blocks, which are sharded, recomputed and compiled one by one",
    "Sequential": "modules called in turn, keys 0, 1, ...",
    "Linear": "(in, out, bias=True, init=XAVIER_UNIFORM, matrices=1); weight (out, in), bias (out,)",
    "Conv2d": "(in, out, kernel_size, stride=1, padding=0, bias=True, init=XAVIER_UNIFORM); weight (out, in, k, k)",
    "Embedding": "(rows, width, init=Normal(1.0)); weight (rows, width)",
    "LayerNorm": "(width, eps=, elementwise_affine=): over the last axis; affine: weight (width,), bias (width,)",
    "RMSNorm": "(width, eps=1e-6): x / root mean square over the last axis, times weight (width,)",
    "GroupNorm": "(groups, channels, eps=1e-5): over each group of channels of (B, C, H, W); weight (C,), bias (C,)",
    "SiLU": "x * sigmoid(x)",
    "GELU": "(approximate='tanh')",
    "parameter": "(shape, init=ZEROS, trained=True, matrices=0) -> a parameter, float32; its values come later, "
    "unless it is not trained and its init is a function",
    "set_constant": "(module, name, shape, () -> array): a tensor of the module that is neither saved nor trained",
    "freeze_parameters": "(module): its parameters are saved and not trained: nothing of the output depends on them",
}

OPS = {
    "cat": "(tensors, dim)",
    "chunk": "(x, parts, dim) -> tuple",
    "reshape": "(x, shape)",
    "permute": "(x, axes)",
    "contiguous": "(x): the same values, in memory in the order of the axes",
    "broadcast_to": "(x, shape): axes of length 1 repeated",
    "linear": "(x (..., in), weight (out, in), bias (out,)) -> x W^T + b",
    "exp": "(x)",
    "expm1": "(x): exp(x) - 1, accurate near 0",
    "log": "(x)",
    "sigmoid": "(x): 1 / (1 + exp(-x)), accurate near 0",
    "tanh": "(x)",
    "sin": "(x)",
    "cos": "(x)",
    "addcmul": "(x, y, z): x + y * z in one pass, with broadcasting",
    "clamp": "(x, min, max); either may be None",
    "where": "(condition, x, y); x and y tensors",
    "mean_per_sample": "(x): mean over every axis but the first -> (B,)",
    "cosine_similarity": "(x, y, dim): of the vectors along ``dim``, an axis that the result does not have",
    "take": "(table, index): rows of a 1-D table",
    "pad": "(x, (left, right, top, bottom)): zeros around the last two axes",
    "upsample_nearest_2x": "(x): (B, C, H, W) -> (B, C, 2H, 2W), each pixel four times",
    "attention": "(q (B, heads, N, d), k, v (B, heads, M, d), mask=None) -> softmax(q k^T / sqrt(d)) v; nothing is "
    "attended to where mask, which broadcasts to (B, heads, N, M), is false",
    "rotary": "(x (B, heads, N, d), cos, sin (N, d / 2)): pairs on the last axis, neighbours, rotated by position",
    "context_parallel_size": "() -> number of ranks that split the tokens of a sample (--context-parallel-size)",
    "split_tokens": "(x (B, N, D)) -> this rank's tokens; the number of ranks divides N",
    "gather_tokens": "(x): undoes split_tokens",
    "tokens_to_heads": "(x (B, heads, N, d)): some tokens of every head -> every token of some heads, of such samples",
    "heads_to_tokens": "(x): undoes tokens_to_heads",
    "stop_gradient": "(x)",
    "without_gradient": "(function, *inputs) -> its result, through which no gradient flows",
    "derivative_along": "(function, inputs, tangents) -> derivative of its result as the inputs change along the "
    "tangents; no gradient flows through it",
    "to_float32": "(x)",
    "cast_like": "(x, y): x in the dtype of y",
    "tensor": "(array): on the runtime's device",
    "from_host": "(function of integers to a shape) -> decorator that lets a function of the same integers to an array "
    "of that shape return a tensor; in a graph it is a constant",
    "numpy": "(x) -> array, float32 for low-precision floats",
    "no_grad": "() -> context in which no gradient is recorded",
}

RUNTIME = {
    "initialize": "(backend | None, micro, global batch, ranks that share a sample): join the group, choose the device",
    "HAS_CONTEXT_PARALLEL": "whether several ranks can share the tokens of a sample",
    "check_backend": "(name | None): raise an error that names a backend the device does not have",
    "shutdown": "(): leave the process group",
    "device_type": "() -> 'cpu', 'cuda' or 'npu'",
    "device_name": "() -> description for the log",
    "device_memory_bytes": "() -> bytes of this process's device, of the machine on a CPU; None if unknown",
    "BF16_MODES": "how a training step may compute in bfloat16: some of configs.precision.ComputeMode",
    "rank": "() -> rank of this process",
    "world_size": "() -> number of processes",
    "data_parallel_rank": "() -> which samples of a batch are this rank's; ranks that share samples have the same",
    "data_parallel_size": "() -> ranks, or groups of them, that have separate samples",
    "to_device": "(batch of arrays) -> batch of tensors",
    "mean_over_ranks": "(list of scalar tensors) -> list of scalar tensors",
    "mean_over_ranks_on_cpu": "(array) -> array, float32: its mean over all ranks, without waiting for the device",
    "read_later": "(list of scalar tensors) -> a PendingRead: their values, without waiting for them now",
    "num_microbatches": "() -> micro-batches of one optimizer step on this rank",
    "any_over_ranks": "(bool) -> bool: true if it is true on any rank",
    "each_any_over_ranks": "(list of bool) -> list of bool: each true if it is true on any rank, in one exchange",
    "barrier": "(): wait for every rank",
    "load_arrays": "(module, {name: array}): write values into the parameters of a module",
    "HAS_LOW_BIT_WEIGHTS": "whether frozen linear layers can keep their weights in few bits",
    "without_weights": "() -> context in which linear layers are built without memory for their weights",
    "pack_weights": "(network, {name of a weight: format}): linear layers, built in without_weights, keep these "
    "weights in few bits, and get memory for the others; the values come later",
    "shapes": "(module) -> {name: shape} of its parameters",
    "meta_device_context": "() -> context in which tensors have shapes and no values; None if there is no such context",
    "to_runtime_device": "(module) -> the module on the device",
    "prepare_frozen": "(module, 'fp32' | 'bf16' = 'fp32') -> the module on the device in that precision, frozen",
    "autocast": "(bool) -> context in which, if true, matrix products run in bfloat16",
    "CAN_SAMPLE_IN_BF16": "whether autocast and cast_matmul_weights_to_bf16 work; if not, they raise with the flag",
    "cast_matmul_weights_to_bf16": "(module) -> the module, linear and convolutional weights in bfloat16, or an error",
    "allow_tf32": "(bool): whether float32 products may round their inputs to TensorFloat-32, or raise an error",
    "free_memory": "(): release the device's unused memory",
    "Profiler": "(path): records what is computed from now on; stop() writes the trace there and returns its path",
    "report_failure": "(error): store the reason where the launcher looks for it",
    "jit_forward": "(module) -> the module, its forward compiled if the interpreted one is slow",
    "compile_blocks": "(blocks, shapes=1 of samples): compile each in place for --torch-compile, or raise an error",
    "versions": "() -> {package: version}",
}

OPTIM = {
    "gradients": "(module, losses) -> (losses (B,), {name: gradient of their mean}); losses: () -> tensor",
    "adamw_step": "(module, losses, lr, betas=(0.9, 0.999)): one AdamW step on their mean, eps 1e-8, no decay",
}


class _LazyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_module(name: str) -> Any:
    """Return a stand-in for the module ``name``, which is imported when it is first used."""
    return _LazyModule(name)


@contextmanager
def fast_imports() -> Iterator[None]:
    """Import in this block without garbage collection (a third faster), and exempt what is imported from it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's limit: of control groups version 2, and version 1."""


def host_memory_bytes() -> int:
    """Return the bytes of memory that processes of this machine, or of this container, can have together."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [path.read_text().strip() for path in _LIMITS if path.is_file()]
    return min([installed, *(int(limit) for limit in limits if limit.isdigit())])
