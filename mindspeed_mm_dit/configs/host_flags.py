"""Flags of MindSpeed-MM that the standalone host does not know, and the check for flags that a host cannot follow."""

from __future__ import annotations

from mindspeed_mm_dit.configs.flag import NAMES, Host
from mindspeed_mm_dit.configs.run import RunConfig, rows
from mindspeed_mm_dit.errors import ConfigError

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
"""Flags of MindSpeed-MM that DiT scripts often contain."""


def refuse(args: RunConfig, host: Host, resumes: bool) -> None:
    """Raise ConfigError for a flag that ``host`` cannot follow (``refused_in`` of its row).

    ``resumes``: the run resumes from a checkpoint, so ``--init-from`` does not matter.
    """
    for row in rows():
        value = getattr(args, row.name)
        if host not in row.refused_in or value in (row.default, None) or (resumes and row.name == "init_from"):
            continue
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
        what = row.word if value is True else f"{row.word} = {text}"
        raise ConfigError(what, f"is not supported in this host: {NAMES[host]} {row.refusal}", row.cure)
