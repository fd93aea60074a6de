"""The command line of a run in MindSpeed-MM: add the flags that our scripts may leave out, and report what it ignores.

The host reads ``sys.argv`` itself, so the completed command line goes there.
"""

from __future__ import annotations

import itertools
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.arguments import Parser, default_micro_batch
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.integrations.mindspeed_mm.flags import ignored_by
from mindspeed_mm_dit.objectives.registry import NOISE_LEVEL
from mindspeed_mm_dit.training.flags import ignored_flags, project_flags
from mindspeed_mm_dit.training.log import QUARTERS, quarter_name, sums_by_quarter

ALWAYS = ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights", "--no-load-rng")
"""Flags that Megatron requires for a model without a vocabulary and without its fused kernels. Nothing here draws from
the generators that Megatron saves, and a checkpoint of the standalone host has none."""

OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
"""On a resume, either the flags or the checkpoint set the learning rate schedule; here the flags do."""

OUR_DEFAULTS = {"--log-interval": "1", "--weight-decay-exclude-modules": ".bias"}
"""Flags whose default in the host differs from the standalone host, with our values."""

CHECKED = frozenset(
    ("mm_model", "mm_data", "mm_tool", "ai_framework", "micro_batch_size", "global_batch_size", "context_parallel_size",
     "train_iters", "seed", "optimizer", "bf16", "use_torch_fsdp2", "fsdp2_config_path", "save", "load",
     "save_interval", "eval_interval")
)  # fmt: skip
"""Megatron's flags that we check before the host reads all of them."""


def parse(argv: Sequence[str]) -> RunConfig:
    """Parse the flags of ``CHECKED`` and this project's flags; the defaults of others are not known yet."""
    parser = Parser(add_help=False, allow_abbrev=False)
    project_flags(parser)
    for row in rows():
        if row.name in CHECKED:
            row(parser, required=False)
    for flag in ("--fp16", "--use-distributed-optimizer"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--ckpt-format")  # (whose default follows from another)
    return RunConfig.of(vars(parser.parse_known_args(list(argv))[0]))


def without_effect(argv: Sequence[str]) -> list[str]:
    """Return the flags in ``argv`` that have no effect here."""
    return ignored_flags(parse(argv), ignored_by("megatron"), lambda kind: not kind.in_megatron)


def uses_mindspore(argv: Sequence[str]) -> bool:
    """Return whether the host will compute on MindSpore (``torch`` is MSAdapter then)."""
    return bool(parse(argv).ai_framework == "mindspore")


def complete(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` for the host, so that one train.args serves both hosts and both frameworks.

    Adds, unless given, the flags that every DiT run needs there, and our defaults. With FSDP2 it leaves out ``--bf16``:
    the host would keep the weights themselves in bfloat16, while ``param_dtype: bf16`` of fsdp2.yaml computes in
    bfloat16 and keeps float32 weights, which is what the flag means here. Without FSDP2 it leaves out the path of
    fsdp2.yaml. On MindSpore the host has no FSDP2; there its distributed optimizer is used instead.
    """
    flags = parse(argv)
    fsdp2 = flags.use_torch_fsdp2 and flags.ai_framework != "mindspore"
    added = [flag for flag in ALWAYS if flag not in argv]
    for flag, value in OUR_DEFAULTS.items():
        if flag not in argv:
            added += [flag, value]
    if flags.micro_batch_size is None and flags.global_batch_size is not None:
        added += ["--micro-batch-size", str(default_micro_batch(flags.global_batch_size, launch_rank()[1]))]
    if not {OVERRIDE, KEEP} & set(argv):
        added.append(OVERRIDE)
    if flags.ai_framework == "mindspore" and not flags.parts["use_distributed_optimizer"]:
        added.append("--use-distributed-optimizer")
    if flags.save is not None and flags.save_interval is None and flags.train_iters is not None:
        added += ["--save-interval", str(flags.train_iters)]  # at the end only
    if "--eval-iters" not in argv:
        added += ["--eval-iters", "0" if flags.eval_interval is None else "10"]
    if flags.ckpt_format is None:
        added += ["--ckpt-format", "torch_dcp" if fsdp2 else "torch"]
    words = list(argv)
    for flag in ("--bf16",) if fsdp2 else ("--use-torch-fsdp2", "--fsdp2-config-path"):
        words = _without(words, flag)
    return [*words, *added]


def launch_rank() -> tuple[int, int]:
    """Return (rank, number of processes) as set by torchrun or msrun; (0, 1) without a launcher."""
    rank = os.environ.get("RANK", os.environ.get("RANK_ID", "0"))
    return int(rank), int(os.environ.get("WORLD_SIZE", os.environ.get("MS_WORKER_NUM", "1")))


def _without(argv: Sequence[str], flag: str) -> list[str]:
    """Drop ``flag``, and the value after it if there is one."""
    rest, skip = [], False
    for word in argv:
        if word == flag:
            skip = True
        elif skip and not word.startswith("--"):
            skip = False
        elif not word.startswith(f"{flag}="):
            rest.append(word)
            skip = False
    return rest


Tensor = Any


def endless_validation(batches: Iterable[Any] | None, args: Namespace) -> Iterator[Any] | None:
    """Return an endless stream in which every validation starts with the same first batch."""
    if batches is None:
        return None
    each = args.eval_iters * (args.global_batch_size // args.micro_batch_size // args.data_parallel_size)
    return itertools.chain.from_iterable(itertools.islice(batches, each) for _ in itertools.count())


def validation_step(forward_step: Callable[..., Any], batches: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Run ``forward_step`` on the next held-out micro-batch, and report the loss by noise level too."""
    batch = next(batches)
    losses, loss_func = forward_step(iter([batch]), model)

    def reported(losses: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss, metrics = loss_func(losses)
        return loss, {**metrics, **_by_quarter(framework.ops.numpy(losses), batch[NOISE_LEVEL])}

    return losses, reported


def _by_quarter(losses: np.ndarray, noise_levels: np.ndarray) -> dict[str, tuple[Tensor, Tensor]]:
    """Return sum and number of ``losses`` in each quarter of the noise level; Megatron adds these up, then divides."""
    sums = sums_by_quarter(losses, noise_levels).astype(np.float32)
    means = framework.runtime.mean_over_ranks([framework.ops.tensor(value) for value in sums.reshape(-1, 1)])
    return {quarter_name(quarter): (loss, count) for quarter, loss, count in zip(QUARTERS, means[:4], means[4:])}
