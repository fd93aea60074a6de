"""Write the table of docs/scaling.md: what a training step asks of a device.

    PYTHONPATH=tests/mock_accelerator python -m tests.device.table

A row counts the operators of a step on the device apart. In the row below it the blocks are compiled: the kernels of
one, forward and backward, as inductor makes them for a CPU, which takes a minute, stand for those of each block.
"""

import copy
from collections import Counter
from typing import Any

import torch

from tests.device.steps import Steps, narrow

MODELS = {"DiT-XL/2": "imagenet256", "CustomDiT": "t2v_custom", "Wan 1.3B": "wan2.1_1.3b"}
KINDS = {"mm": "products", "addmm": "products", "bmm": "products", "convolution": "products", "_scaled": "attention",
         "native_layer_norm": "norms", "_fused_rms_norm": "norms", "gelu": "norms", "silu": "norms"}  # fmt: skip
"""By the beginning of an operator's name."""
REST_OF_FLOOR = 3
"""One fused optimizer step, one EMA update, one norm of the gradients."""


def kinds(operators: dict[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, count in operators.items():
        name = name.removeprefix("aten::")
        found[next((kind for start, kind in KINDS.items() if name.startswith(start)), "rest")] += count
    return found


def there_and_back(block: Any, inputs: tuple[Any, ...]) -> None:
    """Compute a block's output, and the gradients of its inputs and weights."""
    block.zero_grad()
    output = block(*inputs)
    torch.autograd.backward(output, output)  # any gradient will do


def of_one_block(block: Any, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """Return the operators of a block on the device, and its kernels once it is compiled."""
    from torch._inductor import config, ir, scheduler

    inputs = tuple(x if x is None else x.detach().requires_grad_(x.requires_grad) for x in inputs)
    torch.npu.reset()
    there_and_back(block, inputs)
    operators = sum(torch.npu.counts()["operators"].values())
    there, made = tuple(x if x is None else x.detach().cpu().requires_grad_(x.requires_grad) for x in inputs), []
    with config.patch(_post_fusion_custom_pass=lambda nodes: made.extend(nodes) or nodes):
        there_and_back(torch.compile(copy.deepcopy(block).cpu()), there)
    free = [each for each in made if isinstance(each, scheduler.NopKernelSchedulerNode)]
    free += [each for each in made if isinstance(each.node, ir.MultiOutput)]
    return operators, len(made) - len(free)


def rows(name: str, config: str) -> list[str]:
    steps, given = Steps(narrow(config)), []
    blocks = steps.model.predictor.blocks
    watch = blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    steps.step()
    watch.remove()
    torch.npu.reset()
    steps.step()
    found = torch.npu.counts()
    by_kind, total = kinds(found["operators"]), sum(found["operators"].values())
    products, attention, norms = (by_kind[kind] for kind in ("products", "attention", "norms"))
    operators, kernels = of_one_block(blocks[0], given[0])
    compiled = total - len(blocks) * (operators - kernels)
    shared = f"{products + attention + REST_OF_FLOOR:,} | {products} | {attention}"
    return [
        f"| {name} | {total:,} | {shared} | {norms} | {by_kind['rest']:,} | {found['waits']} |",
        f"| the same, blocks compiled | {compiled:,} | {shared} | together: {compiled - products - attention:,} | | |",
    ]


if __name__ == "__main__":
    for name, config in MODELS.items():
        print(*rows(f"{name}, `{config}`", config), sep="\n", flush=True)
