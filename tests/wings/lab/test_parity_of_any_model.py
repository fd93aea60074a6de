"""mm-dit parity on a model of other sizes: against float64, with rows at both ends of the chain."""

from __future__ import annotations

import os
import subprocess

import numpy as np
import pytest
import torch

from benchmarks.sweep import random_weights
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.gaussian_diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.framework.pytorch import optim, runtime
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.objectives.gaussian.process import TABLES, GaussianDiffusion
from mindspeed_mm_dit.wings.lab.parity import compare
from tests.conftest import ROOT
from tests.forked import PATIENCE_SECONDS

CONFIG = DiTConfig(input_size=16, num_classes=3, patch_size=4, hidden_size=96, num_layers=3, num_heads=6)
WEIGHTS = random_weights(CONFIG, seed=1)
QUANTITIES = 5 + len(WEIGHTS)  # what results() yields


def in_float64():
    """The model and the diffusion process, their constants in float64 too."""
    model, diffusion = DiT(CONFIG), GaussianDiffusion.from_config(GaussianDiffusionConfig())
    runtime.load_arrays(model, WEIGHTS)
    model.double()
    model.t_embedder.frequencies = torch.from_numpy(np.exp(-np.log(10000) * np.arange(128) / 128))
    for name in TABLES:
        setattr(diffusion, name, torch.from_numpy(getattr(diffusion.schedule, name)))
    return model, diffusion


def results(model, diffusion, x0, noise, t, y):
    x_t = diffusion.noised(x0, t, noise)
    with torch.no_grad():
        output = model(x_t, t, y)
        yield "x_t", x_t.numpy()
        yield "output", output.numpy()
        yield "loss_mse", diffusion.simple_loss(output, x0, t, noise).numpy()
        yield "loss_vb", diffusion.variational_bound(output, x0, x_t, t, noise).numpy()
    losses, gradients = optim.gradients(model, lambda: diffusion.loss(model(x_t, t, y), x0, x_t, t, noise))
    yield "loss", losses
    for name, gradient in gradients.items():
        yield f"grad_norm/{name}", np.linalg.norm(gradient)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> list[str]:
    """A reference file, whose float32 values are the float64 ones rounded, and the weights it was made with."""
    folder, draw = tmp_path_factory.mktemp("reference"), np.random.default_rng(0)
    model, diffusion = in_float64()
    torch.save({name: p.detach().float() for name, p in model.named_parameters()}, folder / "weights.pt")
    x0, noise = draw.standard_normal((2, 4, 4, 16, 16), np.float32)
    integers = {"t": np.array([0, 1, 500, 999]), "y": np.array([0, 2, 1, 3])}
    given = (torch.from_numpy(a) for a in (x0.astype(float), noise.astype(float), *integers.values()))
    values = {"config": np.array([96, 3, 6, 4, 16, 4, 3]), "x0": x0, "noise": noise, **integers}
    for name, exact in results(model, diffusion, *given):
        values |= {name: np.float32(exact), f"float64/{name}": exact}
    np.savez(folder / "any.npz", **values)
    return [f"{folder}/any.npz", f"{folder}/weights.pt"]


def test_pytorch_reproduces_a_model_of_any_sizes(reference):
    findings = compare(*reference, tolerance=1e-5, table_tolerance=1e-12)
    assert len(findings) == QUANTITIES
    assert max(f.error for f in findings) < 5e-6  # measured: 1e-6


@pytest.mark.extended
@pytest.mark.ranks
def test_mindspore_reproduces_a_model_of_any_sizes(reference):
    python = os.environ.get("MM_DIT_MINDSPORE_PYTHON")
    if python is None:
        pytest.skip("MM_DIT_MINDSPORE_PYTHON names no interpreter")
    command = [python, "-m", "mindspeed_mm_dit.cli.main", "parity", "--ai-framework", "mindspore"]
    command += ["--reference", reference[0], "--checkpoint", reference[1]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-8000:]
    assert f"{QUANTITIES} of {QUANTITIES} quantities within tolerance" in done.stdout
