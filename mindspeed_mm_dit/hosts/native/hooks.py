"""What the engine lacks, hung into the hooks it and PyTorch have, and the two functions of it that are replaced."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.hosts.native.curves import LOGGER, Curves
from mindspeed_mm_dit.hosts.native.run import current


def hang_in() -> None:
    """Follow every optimizer step, and what is logged of them."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    folder = current().flags.parts["tensorboard_dir"]
    if folder is not None and runtime.rank() == 0:
        logging.getLogger(LOGGER).addHandler(Curves(folder))


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Let a resumed run go on with the yaml's settings, and let only matrices decay, as in every host."""
    run, flags = current(), current().flags
    run.model.moving_average()  # begins with the weights before the first step
    for group in optimizer.param_groups:
        if run.first_lr is not None:  # (the checkpoint has brought what it was trained with)
            group["lr"], group["eps"] = run.first_lr, flags.parts["adam_eps"]
            group["betas"] = (flags.parts["adam_beta1"], flags.parts["adam_beta2"])
        group["weight_decay"] = 0.0  # (the engine lets biases and other vectors decay as well)
        _decay([p for p in group["params"] if p.ndim >= 2 and p.grad is not None], group["lr"] * flags.weight_decay)
    run.first_lr = None


@torch.no_grad()
def _decay(matrices: list[torch.Tensor], share: float) -> None:
    """Shrink weights by ``share`` (Loshchilov & Hutter 2019)."""
    for p in matrices if share else ():
        p.mul_(1 - share)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    current().model.moving_average().update()
