"""The published DiT's numbers come out, in whatever framework: forward, losses, gradients, samples.

``data/dit_tiny_p2.npz`` holds inputs and results of the reference model in float32 on a CPU, ``.pt`` its weights.
The relative error is the norm of the difference over the norm of the reference; 1e-5 is some tens of float32's
rounding errors, as a different order of summation gives.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.torch_file import read_torch_file

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-5


def relative_error(found, wanted):
    return np.linalg.norm(np.asarray(found, np.float64) - wanted) / np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(DATA / "dit_tiny_p2.npz"))


@pytest.fixture(scope="module")
def dit(framework, golden):
    """The golden model and its inputs as tensors, in the framework of this run."""
    from mindspeed_mm_dit.configs.model import DiTConfig, GaussianDiffusionConfig
    from mindspeed_mm_dit.diffusion.gaussian import GaussianDiffusion
    from mindspeed_mm_dit.models.dit import DiT

    hidden, depth, heads, patch, size, channels, classes = map(int, golden["config"])
    model = DiT(DiTConfig(input_size=size, num_classes=classes, in_channels=channels, patch_size=patch,
                          hidden_size=hidden, num_layers=depth, num_heads=heads))  # fmt: skip
    weights = read_torch_file(DATA / "dit_tiny_p2.pt")["model"]
    positions = framework.ops.numpy(model.pos_embed)
    framework.runtime.load_arrays(model, weights)
    inputs = {name: framework.ops.tensor(golden[name]) for name in ("x0", "noise", "t", "y")}
    diffusion = GaussianDiffusion.from_config(GaussianDiffusionConfig())
    x_t = diffusion.q_sample(inputs["x0"], inputs["t"], inputs["noise"])
    return SimpleNamespace(
        model=model, weights=weights, positions=positions, diffusion=diffusion, classes=classes, x_t=x_t, **inputs
    )


def losses(dit):
    output = dit.model(dit.x_t, dit.t, dit.y)
    return dit.diffusion.training_losses(output, dit.x0, dit.x_t, dit.t, dit.noise)


def trained_parameters(dit):
    return {name: parameter for name, parameter in dit.model.named_parameters() if parameter.requires_grad}


def gradients(framework, dit):
    """Return {parameter: gradient of the mean loss}, as tensors of the framework."""
    trained = trained_parameters(dit)
    if framework.active() == "pytorch":
        torch = importlib.import_module("torch")
        return dict(zip(trained, torch.autograd.grad(losses(dit).loss.mean(), list(trained.values())), strict=True))
    mindspore = importlib.import_module("mindspore")
    _, found = mindspore.value_and_grad(lambda: losses(dit).loss.mean(), None, list(trained.values()))()
    return dict(zip(trained, found, strict=True))


def adamw_step(framework, dit):
    """Take one step of the framework's own AdamW with the golden settings."""
    settings = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    parameters, found = list(trained_parameters(dit).values()), gradients(framework, dit)
    if framework.active() == "mindspore":
        optim = importlib.import_module("mindspore.experimental.optim")
        optim.AdamW(parameters, **settings)(tuple(found.values()))
        return
    for parameter, gradient in zip(parameters, found.values(), strict=True):
        parameter.grad = gradient
    importlib.import_module("torch").optim.AdamW(parameters, **settings).step()


def test_the_model_has_the_published_names(dit):
    assert {name for name, _ in dit.model.named_parameters()} == set(dit.weights)


def test_positions_are_the_published_ones(dit):
    assert relative_error(dit.positions, dit.weights["pos_embed"]) < TOLERANCE


def test_schedule_tables(dit, golden):
    for name in (name for name in golden if name.startswith("table/")):
        assert relative_error(getattr(dit.diffusion.schedule, name[6:]), golden[name]) < 1e-12, name


def test_noised_latents_output_and_losses(framework, dit, golden):
    ops = framework.ops
    with ops.no_grad():
        output, terms = dit.model(dit.x_t, dit.t, dit.y), losses(dit)
    found = {"x_t": dit.x_t, "output": output, "loss": terms.loss, "loss_mse": terms.mse, "loss_vb": terms.vb}
    errors = {name: relative_error(ops.numpy(value), golden[name]) for name, value in found.items()}
    assert max(errors.values()) < TOLERANCE, errors


def test_gradient_norms_of_the_mean_loss(framework, dit, golden):
    found = gradients(framework, dit)
    wanted = {name.removeprefix("grad_norm/"): value for name, value in golden.items() if name.startswith("grad_norm/")}
    assert set(found) == set(wanted)
    errors = {name: relative_error(np.linalg.norm(framework.ops.numpy(found[name])), wanted[name]) for name in wanted}
    assert max(errors.values()) < TOLERANCE, errors


def test_guided_output_on_three_channels(framework, dit, golden):
    from mindspeed_mm_dit.diffusion.guidance import Guidance

    ops, null = framework.ops, framework.ops.tensor(np.full(dit.y.shape, dit.classes))
    with ops.no_grad():
        both = dit.model(ops.cat([dit.x_t, dit.x_t], 0), ops.cat([dit.t, dit.t], 0), ops.cat([dit.y, null], 0))
        labelled, unlabelled = ops.chunk(both, 2, 0)
        guided = Guidance(4.0, "3").combine(labelled, unlabelled, 4)
    # The published code guides both halves of its doubled batch, and keeps the second's own remaining channels.
    second = ops.cat([guided[:, :3], unlabelled[:, 3:]], 1)
    assert relative_error(ops.numpy(ops.cat([guided, second], 0)), golden["cfg_output_scale4_rgb3"]) < TOLERANCE


@pytest.mark.parametrize(("chain", "sampler_name"), [("10", "ddpm"), ("ddim10", "ddim")])
def test_samples(framework, dit, golden, chain, sampler_name):
    from mindspeed_mm_dit.diffusion.guidance import Guidance, guided_network
    from mindspeed_mm_dit.diffusion.samplers import find_sampler
    from mindspeed_mm_dit.diffusion.schedule import respaced_steps

    ops, sampler = framework.ops, find_sampler(sampler_name)
    steps = respaced_steps(1000, 10, sampler.spacing)
    assert (steps == golden[f"timestep_map/{chain}"]).all()
    half = len(dit.y)  # the published code samples a doubled batch; its first half is the sample
    labels = np.minimum(golden["y"], dit.classes - 1)
    start, noises = golden[f"sample/{chain}/start"][:half], golden.get(f"sample/{chain}/noise_draws")
    with ops.no_grad():
        predict = guided_network(
            dit.model, ops.tensor(labels), ops.tensor(np.full_like(labels, dit.classes)), Guidance(4.0, "3"), 1000
        )
        states = sampler.run(
            dit.diffusion.respaced(steps), predict, ops.tensor(start), lambda i: ops.tensor(noises[i][:half])
        )
        *_, sample = states
    assert relative_error(ops.numpy(sample), golden[f"sample/{chain}/result"][:half]) < TOLERANCE


def test_losses_after_one_adamw_step(framework, dit, golden):
    adamw_step(framework, dit)
    with framework.ops.no_grad():
        found = framework.ops.numpy(losses(dit).loss)
    framework.runtime.load_arrays(dit.model, dit.weights)
    assert relative_error(found, golden["loss_after_one_adamw_step"]) < TOLERANCE
