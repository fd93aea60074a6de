"""Train a diffusion transformer on images or videos, in MindSpeed-MM or in the standalone host.

Run it with examples/dit/pretrain.sh, torchrun or msrun; ``--help`` explains every flag.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from mindspeed_mm_dit.framework.exits import exit_on_sigint

exit_on_sigint()  # there is nothing to save yet

from mindspeed_mm_dit.hosts.registry import choose_host
from mindspeed_mm_dit.training.flags import project_flags

host = choose_host(sys.argv[1:], project_flags)  # before any import that needs a framework

from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.training.contract import train_valid_batches
from mindspeed_mm_dit.training.report import report

Tensor = Any  # a tensor of the chosen framework


def model_provider(pre_process: bool = True, post_process: bool = True) -> DiTModel:
    """Build the model that model.json describes."""
    host.print_rank_0("building DiT model ...")
    return DiTModel(host.get_args().mm.model, *host.load_encoders())


def get_batch(data_iterator: Iterator[dict[str, Any]]) -> dict[str, Tensor]:
    """Move the next micro-batch to the device."""
    return runtime.to_device(next(data_iterator))


def loss_func(output_tensor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Reduce the losses of samples (B,) to the loss to minimise, and the losses to report."""
    loss = output_tensor.mean()
    averaged = host.average_losses_across_data_parallel_group([loss])
    return loss, {"loss": averaged[0]}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Any]:
    """Run one micro-batch through the model."""
    return model(**get_batch(data_iterator)), loss_func


def train_valid_test_datasets_provider(train_val_test_num_samples: list[int]) -> tuple[Any, Any, Any]:
    """Return the training micro-batches, starting at the run's next step, the validation micro-batches, and None."""
    return (*train_valid_batches(host.get_args()), None)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    host.pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        host.ModelType.encoder_or_decoder,
        forward_step,
        extra_args_provider=project_flags,
        args_defaults={"dataloader_type": "external", "vision_pretraining": False, "curr_forward_iteration": 0},
    )
    report(host.get_args())
