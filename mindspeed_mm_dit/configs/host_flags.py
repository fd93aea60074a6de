"""Flags of Megatron-LM and MindSpeed-MM that the standalone host does not know, and one that it alone knows."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.optimizers.registry import DEFAULT

_NAMES = """
--accumulate-allreduce-grads-in-fp32 --async-save --attention-dropout --auto-settings
--calculate-per-sample-loss --ckpt-step --dataloader-type --ddp-bucket-size --downcast-to-bf16
--exit-interval --exit-signal-handler --finetune --fp16 --hidden-dropout
--hidden-size --init-model-with-meta-device --initial-loss-scale --jit-compile --log-throughput --log-tps
--lora-apply-modules --lora-mixed-training --lora-register-forward-hook --lora-target-parameters
--lr-mult --lr-scale-modules --lr-warmup-fraction --max-position-embeddings
--num-attention-heads --num-layers --optimizer-selection --overlap-grad-reduce --overlap-param-gather
--override-opt_param-scheduler --position-embedding-type --recompute-granularity --recompute-method
--recompute-num-layers --seq-length --sequence-parallel --swiglu --tokenizer-type --train-samples
--trust-remote-code --use-checkpoint-opt_param-scheduler --use-cpu-initialization --use-data-balance
--use-deter-comp --use-distributed-optimizer --use-flash-attn --use-fused-rmsnorm
--weight-decay-exclude-modules
"""

HOST_ONLY = frozenset(_NAMES.split())
"""That DiT scripts often carry."""


def refuse_power_ema(stds: Sequence[float] | None, host: str) -> None:
    """Raise ConfigError for --power-ema-stds where a run of another host would keep no such averages."""
    if stds:
        raise ConfigError(
            f"--power-ema-stds = {' '.join(map(str, stds))}",
            f"is acted on by the standalone host alone; in {host} there is the plain average alone",
            "leave it out, or use --host standalone",
        )


def refuse_optimizer(name: str, host: str) -> None:
    """Raise ConfigError for an optimizer where a run of another host would not go on with its state."""
    if name != DEFAULT:
        raise ConfigError(
            f"--optimizer = {name}",
            f"is acted on by the standalone host alone; checkpoints of {host} are read with the state of AdamW",
            f"use {DEFAULT}, or --host standalone",
        )


def refuse_tuning(patterns: Sequence[str], host: str) -> None:
    """Raise ConfigError for --lora-target-modules or --freeze where another host would train all the same."""
    if patterns:
        raise ConfigError(
            f"--lora-target-modules, --freeze = {' '.join(patterns)}",
            f"are acted on by the standalone host alone: {host} would train the whole network",
            "leave them out, or use --host standalone",
        )


def refuse_init_from(init_from: str | None, host: str) -> None:
    """Raise ConfigError for --init-from where a run of another host would begin: it would not be acted on."""
    if init_from is not None:
        raise ConfigError(
            f"--init-from = {init_from}",
            f"is acted on by the standalone host alone, and this run would begin in {host}",
            "begin with --host standalone --train-iters 1 --save NEW, then go on here with --load NEW",
        )
