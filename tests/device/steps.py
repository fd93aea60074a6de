"""Networks of the embedded configs, at full depth and narrow width, and their steps on this process's device."""

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_mm_dit import framework
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.configs.model import AE_CONFIGS, ModelConfig, load_model_config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from tests.conftest import ROOT, run_config

FLAGS = {"seed": 0, "weight_decay": 0.1, "ema_decay": 0.99, "clip_grad": 1.0, "adam_eps": 1e-3}


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Have the project find no device: the numbers to compare with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framework.runtime, "_cpu_only", True)
        yield


def narrow(config: str) -> ModelConfig:
    """Return the model of examples/dit/CONFIG with one head, narrow texts and small latents.

    It has all its blocks, but at most 4 of each kind of joint attention.
    """
    model = load_model_config(ROOT / "examples/dit" / config / "model.json")
    whole = model.predictor
    if isinstance(whole, JointConfig):
        whole, width = whole.reduced_width(), {"num_attention_heads": 1, "joint_attention_dim": 64, "text_length": 8}
    elif hasattr(whole, "heads_key"):  # a transformer of videos
        width = {whole.heads_key: 1, "ffn_dim": 2 * whole.head_dim, "text_dim": whole.text_dim and 64}
    else:
        width = {"num_heads": 1, "hidden_size": whole.head_dim, "projector_dim": min(whole.projector_dim, 64)}
        width["text_dim"] = whole.text_dim and 64
    predictor = dataclasses.replace(whole, **width)
    channels, *sizes = predictor.latent_shape
    with contextlib.suppress(ConfigError):  # some take latents of their own size alone
        predictor = predictor.resized((channels, *(min(size, 8) for size in sizes)))
    return dataclasses.replace(model, predictor=predictor)


class Steps:
    """A model, its engine, and a batch from latents on."""

    def __init__(self, config: ModelConfig, samples: int = 2, micro_batches: int = 1, **flags: Any) -> None:
        framework.activate("pytorch")
        from mindspeed_mm_dit.framework import runtime
        from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
        from mindspeed_mm_dit.models.composite import DiTModel
        from mindspeed_mm_dit.training.dry_run import example

        engines = importlib.import_module("mindspeed_mm_dit.training.pytorch.engine")
        self._micro_batches = runtime._num_microbatches = micro_batches
        self.config = config
        self.model = DiTModel(config, NoAutoencoder(AE_CONFIGS["pixel"]()))
        draw = np.random.default_rng(1)
        shapes = parameters_of(config).shapes()
        start = {name: (0.05 * draw.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
        self.engine = engines.Engine(self.model, run_config(**{**FLAGS, **flags}), None, weights=start)
        latents, *given = example(self.model, config, samples)
        self._batch = (latents + runtime.to_device({"x": draw.standard_normal(latents.shape, np.float32)})["x"], *given)

    def step(self) -> torch.Tensor:
        return self.engine.train_step(self._forward, iter([None] * self._micro_batches), 1e-3).loss

    def validate(self) -> torch.Tensor:
        return self.engine.eval_step(self._forward, iter([None]))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().cpu() for name, p in self.engine.predictor.named_parameters()}

    def _forward(self, batches: Iterator[None], model: Any) -> tuple[torch.Tensor, Any]:
        next(batches)
        return model.losses(*self._batch), lambda losses: (losses.mean(), {"loss": losses.detach().mean()})
