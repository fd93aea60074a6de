"""The command line of a run in the host: what our scripts may leave out is added, what it would misread is said.

The host reads ``sys.argv`` itself, so that is where this happens.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

ALWAYS = ("--no-gradient-accumulation-fusion", "--untie-embeddings-and-output-weights", "--no-load-rng")
"""What Megatron asks of a model without a vocabulary and without its fused kernels. Nothing here draws from the
generators Megatron saves, and a checkpoint of the standalone host has none."""

OVERRIDE, KEEP = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
"""On a resume the flags, or the checkpoint, say what the learning rate schedule is; here the flags do."""

OUR_DEFAULTS = {"--log-interval": "1", "--weight-decay-exclude-modules": ".bias"}
"""The host's flags whose default differs from what the standalone host does."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags that are checked before the host reads all of them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--mm-model", "--mm-data", "--mm-tool", "--fsdp2-config-path", "--ckpt-format", "--save", "--load"):
        parser.add_argument(flag)
    parser.add_argument("--ai-framework", default="pytorch")
    for flag in ("--micro-batch-size", "--global-batch-size", "--train-iters", "--save-interval", "--eval-interval"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--seed", type=int, default=1234)
    for flag in ("--use-torch-fsdp2", "--bf16", "--fp16", "--use-distributed-optimizer", "--no-async-save"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--keep-last", type=int)
    return parser.parse_known_args(list(argv))[0]


def wants_mindspore(argv: Sequence[str]) -> bool:
    """Return whether the host is to compute on MindSpore (``torch`` is MSAdapter then)."""
    return bool(parse(argv).ai_framework == "mindspore")


def complete(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` for the host, so that one train.args serves both hosts.

    Added unless given: flags every DiT run needs there, and defaults of ours. Left out: with FSDP2 ``--bf16``
    (the host would keep the weights themselves in bfloat16, while ``param_dtype: bf16`` of fsdp2.yaml computes
    in it and keeps float32 weights, as the flag means here), and without FSDP2 the path of fsdp2.yaml.
    """
    flags = parse(argv)
    added = [flag for flag in ALWAYS if flag not in argv]
    for flag, value in OUR_DEFAULTS.items():
        if flag not in argv:
            added += [flag, value]
    if not {OVERRIDE, KEEP} & set(argv):
        added.append(OVERRIDE)
    if flags.save is not None and flags.save_interval is None and flags.train_iters is not None:
        added += ["--save-interval", str(flags.train_iters)]  # at the end only
    if "--eval-iters" not in argv:
        added += ["--eval-iters", "0" if flags.eval_interval is None else "10"]
    if flags.ckpt_format is None:
        added += ["--ckpt-format", "torch_dcp" if flags.use_torch_fsdp2 else "torch"]
    return [*_without(argv, "--bf16" if flags.use_torch_fsdp2 else "--fsdp2-config-path"), *added]


def _without(argv: Sequence[str], flag: str) -> list[str]:
    """Drop ``flag`` and, if it is one, the value after it."""
    kept, skip = [], False
    for word in argv:
        if word == flag:
            skip = True
        elif skip and not word.startswith("--"):
            skip = False
        elif not word.startswith(f"{flag}="):
            kept.append(word)
            skip = False
    return kept
