"""Faults of parallel training, and a process of ``mm-dit prove`` that takes steps with each of them, one at a time.

A task whose files are called after a fault is done with that fault planted.
"""

import contextlib
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.tools.verify.processes import Task, read_tasks
from mindspeed_mm_dit.tools.verify.prove import Layout

MUON, CLIPPED = ("--optimizer", "muon"), ("--clip-grad", "0.001")
REPLICATED = Layout("replicated", 2, micro_batches=2)
SHARDED = Layout("FSDP2", 2, sharding={"sharding_size": "auto"}, micro_batches=2)
IGNORED = Layout("FSDP2, ignored", 2, sharding={"sharding_size": "auto", "ignored_modules": ["predictor.t_embedder"]})
CLIPPING = Layout(
    "clipped", 2, what=CLIPPED, sharding={"sharding_size": "auto", "ignored_modules": ["predictor.t_embedder"]}
)
ADAPTED = Layout("LoRA", 2, what=("--lora-target-modules", "{*}", "--lora-r", "2", "--lora-alpha", "1"))
ULYSSES = Layout("Ulysses", 2, ("--context-parallel-size", "2"), context_parallel=2)
DEVICE = Layout("device", cpu_reference=True)
PYNATIVE = Layout("pynative", flags=("--pynative",), micro_batches=2, framework="mindspore")
STEP = "training.pytorch.engine:Engine.train_step"


@dataclass(frozen=True)
class Fault:
    """A line of a function broken on purpose, and what must be said of it."""

    layout: Layout
    function: str
    line: str
    broken: str
    named: str
    """Beginning of the name of the quantity that is said to be wrong."""
    where: str
    """In words where it begins, in the first step."""


GRADIENTS = "after backward"
FAULTS = {
    "no all-reduce of one parameter": Fault(
        REPLICATED, "training.pytorch.parallel:replicate", "    with warnings.catch_warnings():",
        '    model._ddp_params_and_buffers_to_ignore = ["predictor.blocks.1.mlp.fc1.weight"]\n'
        "    with warnings.catch_warnings():", "gradient/blocks.1.mlp.fc1.weight", GRADIENTS),
    "sum for average": Fault(
        IGNORED, "training.pytorch.parallel:average_ignored", "parameter.grad /= runtime.world_size()", "pass",
        "gradient/t_embedder.mlp.", GRADIENTS),
    "average for sum": Fault(
        SHARDED, "training.pytorch.engine:_whole", "norm.full_tensor()", "norm.full_tensor() / 2**0.5",
        "gradient", GRADIENTS),
    "accumulation not divided": Fault(
        REPLICATED, STEP, "(loss / count).backward()", "loss.backward()", "gradient", "backward"),
    "accumulation divided twice": Fault(
        SHARDED, STEP, "(loss / count).backward()", "(loss / count / count).backward()", "gradient/", "backward"),
    "clipping before the reduction": Fault(CLIPPING, STEP, "average_ignored(self.model)\n    grad_norm = self._clip()",
        "grad_norm = self._clip()\n    average_ignored(self.model)", "gradient/", GRADIENTS),
    "no clipping": Fault(CLIPPING, "training.pytorch.engine:Engine._clip", ".clamp(max=1.0)", ".clamp(min=1.0)",
        "gradient/", GRADIENTS),
    "seeds by rank": Fault(SHARDED, "training.contract:train_valid_streams", "args.mm.data_set",
        "type(args.mm.data_set)(args.mm, args.seed + int(__import__('os').environ['RANK']))",
        "gradient/", "forward: the data: input 0"),
    "a norm in bf16": Fault(
        REPLICATED, "models.dit:DiTBlock.forward", "self.norm2(x)", "self.norm2(x.bfloat16()).float()",
        "gradient/blocks.0.mlp.", "forward: module blocks.0, first seen in blocks.0.norm2"),
    "the backward of a layer": Fault(
        SHARDED, "models.dit:Mlp.forward", "self.fc1(x)", "self.fc1(x * 1.01 - ops.stop_gradient(x) * 0.01)",
        "gradient/", "backward: module blocks.1.mlp"),
    "the scale of attention on MindSpore": Fault(
        PYNATIVE, "models.dit:Attention.forward", "self_attention(q, k", "self_attention(q * 1.01, k",
        "gradient/", "forward: module blocks.0.attn, first seen in blocks.0.attn.proj"),
    "the backward of a layer on MindSpore": Fault(
        PYNATIVE, "models.dit:Mlp.forward", "self.fc1(x)", "self.fc1(x * 1.01 - ops.stop_gradient(x) * 0.01)",
        "gradient/", "backward: module blocks.1.mlp"),
    "label dropped twice": Fault(REPLICATED, "data.conditions:PlainCollator._drops", "self._condition.dropout)",
        "1 - (1 - self._condition.dropout) ** 2)", "gradient/y_embedder.embedding_table.weight",
        "forward: the data: input 2"),
    "EMA moved before the step": Fault(SHARDED, STEP, "self.optimizer.step(lr)\n    self.ema.update()",
        "self.ema.update()\n    self.optimizer.step(lr)", "average/", "the average"),
    "stale weights after a gather": Fault(SHARDED, "training.pytorch.parallel:shard", "    return model",
        "    kept = []\n    def stale(module, inputs):\n        kept.append(module.weight.detach().clone())\n"
        "        module.weight.data.copy_(kept[0])\n"
        "    model.predictor.blocks[1].mlp.fc1.register_forward_pre_hook(stale)\n    return model",
        "loss/2", "after the first step"),
    "Muon on the fused matrix": Fault(
        Layout("Muon", 2, what=MUON, sharding={"sharding_size": "auto"}),
        "training.pytorch.stepper:OptimizersContainer.__init__",
        "declared[name].matrices for", "1 for", "step/", "the optimizer"),
    "a compiled graph that leaves a gradient out": Fault(
        Layout("compiled", flags=("--torch-compile",)), "framework.pytorch.runtime:compile_blocks",
        "    for block in blocks:", "    for block in blocks:\n        block.mlp.fc2.bias.requires_grad_(False)",
        "gradient/blocks.0.mlp.fc2.bias", GRADIENTS),
    "a lost last micro-batch": Fault(
        REPLICATED, STEP, "for number in range(count):", "for number in range(count - 1):", "gradient/", "forward"),
    "a wrong eps": Fault(
        REPLICATED, "models.dit:token_norm", "eps=1e-6, elementwise_affine=False", "eps=1e-5, elementwise_affine=False",
        "gradient/blocks.0.", "forward: module blocks.0.norm1"),
    "LoRA scale twice": Fault(
        ADAPTED, "models.layers:LoraLinear.forward", "self.scale * change", "self.scale**2 * change",
        "gradient/blocks.", "forward: module t_embedder.mlp.0"),
    "RoPE's offset on the second rank": Fault(
        ULYSSES, "models.layers:self_attention", "q, k, v = ops.tokens_to_heads(q)",
        "import torch.distributed\n    cos = cos.roll(torch.distributed.get_rank(), 0)\n"
        "    q, k, v = ops.tokens_to_heads(q)", "gradient/", "forward: module blocks.0.attn1"),
    "a batch written anew before it is copied": Fault(DEVICE, "framework.pytorch.runtime:to_device",
        "    return {name: x.pin_memory().to(target, non_blocking=True) for name, x in tensors.items()}",
        "    tensors = {name: x.pin_memory() for name, x in tensors.items()}\n"
        "    there = {name: x.to(target, non_blocking=True) for name, x in tensors.items()}\n"
        "    for x in tensors.values():\n        x.zero_()\n    return there",
        "gradient/", "forward: the data: input 0"),
}  # fmt: skip
OPERATORS = {"the scale of attention": FAULTS["the scale of attention on MindSpore"]}
"""What a side of ``mm-dit compare`` may have."""


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """While entered, the function of a fault is broken, for all who hold it."""
    module, _, name = fault.function.partition(":")
    function = importlib.import_module(f"mindspeed_mm_dit.{module}")
    for part in name.split("."):
        function = getattr(function, part)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(fault.line) == 1, (fault.function, fault.line, source)
    found: dict = {}
    exec(f"from __future__ import annotations\n{source.replace(fault.line, fault.broken)}", function.__globals__, found)
    right, function.__code__ = function.__code__, found[name.rpartition(".")[2]].__code__
    try:
        yield
    finally:
        function.__code__ = right


def main(tasks: list[Task]) -> None:
    """Do the tasks, each with the fault that its files are called after."""
    activate(tasks[0].value("--ai-framework"))
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.tools.verify.worker import compute_task

    for task in tasks:
        fault = (FAULTS | OPERATORS).get(Path(task.output).name.replace("_", " "))
        with planted(fault) if fault else contextlib.nullcontext():
            try:
                compute_task(task)
            except UserError as error:
                task.refuse(error)
    runtime.barrier()
    runtime.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(read_tasks(sys.argv[-1]))
