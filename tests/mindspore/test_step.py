"""Clipping in MindSpore's step: a large gradient is cut to its largest norm, a small one is left as it is."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest

FLAGS = {
    "seed": 0, "tf32": False, "torch_compile": False, "bf16": False, "pynative": True, "adam_beta1": 0.9,
    "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "ema_decay": 0.5,
}  # fmt: skip


@pytest.fixture
def first_moment(mindspore, framework, monkeypatch):
    """The first moment after one step on a gradient of (3, -4) * size, with --clip-grad ``clip``."""
    from mindspeed_mm_dit.training.mindspore.engine import Engine, runtime

    class Composite(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            self.predictor = framework.nn.Linear(2, 1, bias=False)
            self.diffusion = SimpleNamespace(draw_names=("timesteps", "noise"))

        def latents(self, pixels):
            return pixels

        def losses(self, latents, labels, timesteps, noise):
            return self.predictor(latents)[:, 0]

    monkeypatch.setattr(runtime, "num_microbatches", lambda: 2)

    def first_moment(size, clip):
        batch = {"pixels": np.array([[3.0, -4.0]]) * size, "labels": [0], "timesteps": [0], "noise": [0.0]}
        tensors = {name: mindspore.Tensor(np.array(array, np.float32)) for name, array in batch.items()}
        engine = Engine(Composite(), Namespace(**FLAGS, clip_grad=clip), None)
        result = engine.train_step(lambda batches, model: (model(**tensors), None), None, 0.1)
        assert float(result.grad_norm) == pytest.approx(5 * size, rel=1e-6)
        return engine.state()["optimizer.state.weight.exp_avg"] / np.float32(0.1)

    return first_moment


@pytest.mark.parametrize(
    ("size", "clip", "kept"), [(0.01, 1.0, 0.01), (0.19, 1.0, 0.19), (1.0, 1.0, 0.2), (2.0, 0.0, 2.0)]
)
def test_a_gradient_is_cut_to_its_largest_norm_and_never_enlarged(first_moment, size, clip, kept):
    np.testing.assert_allclose(first_moment(size, clip), [[3.0 * kept, -4.0 * kept]], rtol=1e-5)
