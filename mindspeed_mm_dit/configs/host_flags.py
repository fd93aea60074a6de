"""Flags of Megatron-LM and MindSpeed-MM that DiT scripts often carry and the standalone host does not know."""

from __future__ import annotations

_NAMES = """
--accumulate-allreduce-grads-in-fp32 --async-save --attention-dropout --auto-settings
--calculate-per-sample-loss --ckpt-step --dataloader-type --ddp-bucket-size --downcast-to-bf16
--exit-duration-in-mins --exit-interval --exit-signal-handler --finetune --fp16 --hidden-dropout
--hidden-size --init-model-with-meta-device --initial-loss-scale --jit-compile --log-throughput --log-tps
--lora-target-modules --lr-mult --lr-scale-modules --lr-warmup-fraction --max-position-embeddings
--num-attention-heads --num-layers --optimizer-selection --overlap-grad-reduce --overlap-param-gather
--override-opt_param-scheduler --position-embedding-type --recompute-granularity --recompute-method
--recompute-num-layers --seq-length --sequence-parallel --swiglu --tokenizer-type --train-samples
--trust-remote-code --use-checkpoint-opt_param-scheduler --use-cpu-initialization --use-data-balance
--use-deter-comp --use-distributed-optimizer --use-flash-attn --use-fused-rmsnorm
--weight-decay-exclude-modules
"""

HOST_ONLY = frozenset(_NAMES.split())
