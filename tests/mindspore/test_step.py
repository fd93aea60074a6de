"""MindSpore's step: it clips as PyTorch's does, and descends the loss that the script computes, whatever that is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.power_ema import exponent
from mindspeed_mm_dit.configs.parameters import Parameter
from tests.conftest import run_config

FLAGS = {"seed": 0, "pynative": True, "weight_decay": 0.0, "ema_decay": 0.5, "micro_batch_size": 1}


@pytest.fixture
def composite(mindspore, framework):
    """A composite whose network is x -> w x, and whose losses are those products."""

    class Composite(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            self.predictor = framework.nn.Linear(2, 1, bias=False)
            self.asks = False
            self.declared = {"weight": Parameter((1, 2))}

        def initial_weights(self, seed):
            return {"weight": np.full((1, 2), 0.5, np.float32)}

        def latents(self, batch):
            return batch["pixels"]

        def given(self, batch):
            return tuple(batch[name] for name in ("labels", "timesteps", "noise"))

        def losses(self, latents, labels, timesteps, noise):
            return self.predictor(latents)[:, 0]

    return Composite()


def batch_of(mindspore, pixels):
    """Return a micro-batch of those (B, 2) pixels."""
    batch = {"pixels": pixels, **{name: [0] * len(pixels) for name in ("labels", "timesteps", "noise")}}
    return {name: mindspore.Tensor(np.array(array, np.float32)) for name, array in batch.items()}


def mean(output):
    """Return what the script of this project returns."""
    loss = output.mean()
    return loss, {"loss": loss}


@pytest.fixture
def first_moment(mindspore, composite, monkeypatch):
    """The first moment after one step on a gradient of (3, -4) * size, with --clip-grad ``clip``."""
    from mindspeed_mm_dit.training.mindspore.engine import Engine, runtime

    monkeypatch.setattr(runtime, "num_microbatches", lambda: 2)

    def first_moment(size, clip):
        batch = batch_of(mindspore, np.array([[3.0, -4.0]]) * size)
        engine = Engine(composite, run_config(**FLAGS, clip_grad=clip), None)
        result = engine.train_step(lambda batches, model: (model(**batch), mean), None, 0.1)
        assert float(result.grad_norm) == pytest.approx(5 * size, rel=1e-6)
        return engine.state()["optimizer.state.weight.exp_avg"] / np.float32(0.1)

    return first_moment


@pytest.mark.parametrize(
    ("size", "clip", "kept"), [(0.01, 1.0, 0.01), (0.19, 1.0, 0.19), (1.0, 1.0, 0.2), (2.0, 0.0, 2.0)]
)
def test_a_gradient_is_cut_to_its_largest_norm_and_never_enlarged(first_moment, size, clip, kept):
    np.testing.assert_allclose(first_moment(size, clip), [[3.0 * kept, -4.0 * kept]], rtol=1e-5)


@pytest.mark.parametrize("pynative", [False, True])
def test_the_average_stands_in_for_the_weights_while_it_is_asked_for(mindspore, composite, monkeypatch, pynative):
    from mindspeed_mm_dit.training.mindspore.engine import Engine, runtime

    monkeypatch.setattr(runtime, "num_microbatches", lambda: 1)
    composite.ae = composite.diffusion = composite.text_encoders = composite.frames = composite.image_features = None
    composite.predict = lambda x: composite.predictor(x)
    engine = Engine(
        composite, run_config(**{**FLAGS, "pynative": pynative, "micro_batch_size": 3}, clip_grad=0.0), None
    )
    ones = mindspore.Tensor(np.eye(2, dtype=np.float32))
    for _ in range(2):
        engine.train_step(lambda batches, model: (model(**batch_of(mindspore, PIXELS)), mean), None, 0.1)
        state = engine.state()
        with engine.averaged(True) as model:
            np.testing.assert_array_equal(model.predictor(ones).asnumpy(), state["ema.weight"].T)
        np.testing.assert_array_equal(composite.predictor.weight.asnumpy(), state["model.weight"])
        assert (state["ema.weight"] != state["model.weight"]).all()
    with engine.averaged(False) as model:
        assert model is None


@pytest.mark.parametrize("pynative", [False, True])
def test_power_averages_are_sums_over_the_weights_of_all_steps(mindspore, composite, monkeypatch, pynative):
    from mindspeed_mm_dit.training.mindspore.engine import Engine, runtime
    from mindspeed_mm_dit.training.watchers.power_ema import PowerEmas

    monkeypatch.setattr(runtime, "num_microbatches", lambda: 1)
    changed = {"pynative": pynative, "micro_batch_size": 3, "power_ema_stds": (0.05, 0.2)}
    engine = Engine(composite, run_config(**FLAGS | changed, clip_grad=0.0), None)
    watcher, weights = PowerEmas(changed["power_ema_stds"]), []
    for iteration in range(1, 6):
        engine.train_step(lambda batches, model: (model(**batch_of(mindspore, PIXELS)), mean), None, 0.1)
        watcher.after_step(SimpleNamespace(engine=engine, progress=SimpleNamespace(iteration=iteration)), None)
        state = engine.state()
        weights.append(state["model.weight"].astype(np.float64))
    for tree, std in (("power_ema_1", 0.05), ("power_ema_2", 0.2)):
        counted = np.diff((np.arange(6) / 5) ** (exponent(std) + 1))
        wanted = sum(c * w for c, w in zip(counted, weights))
        np.testing.assert_allclose(state[f"{tree}.weight"], wanted, rtol=1e-6, atol=1e-8)  # of steps of 0.1
        assert np.abs(wanted - weights[-1]).max() > 1e-3


PIXELS = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25]], np.float32)

SCRIPTS = {  # what a loss function makes of the losses (B,), and its derivative by each of them
    "mean": (lambda x: x.mean(), lambda x: np.full(3, 1 / 3)),
    "weighted": (lambda x: (x * 2.0).sum(), lambda x: np.full(3, 2.0)),
    "a part": (lambda x: x[1], lambda x: np.array([0.0, 1.0, 0.0])),
    "squares": (lambda x: (x * x).sum(), lambda x: 2 * x),
}


@pytest.mark.parametrize("pynative", [False, True])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_gradient_is_that_of_the_loss_the_script_computes(mindspore, composite, script, pynative):
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss, InterpretedLoss

    loss_of, derivative = SCRIPTS[script]
    weight = composite.predictor.trainable_params()[0]
    step = InterpretedLoss(composite, [weight]) if pynative else CompiledLoss(composite, [weight], 3)
    for value in ([[0.5, -1.0]], [[2.0, 0.25]]):  # the weights that went out of the first call go into the second
        weight.set_data(mindspore.Tensor(np.array(value, np.float32)))
        losses = PIXELS @ np.array(value[0])

        def forward_step(batches, model):
            return model(**next(batches)), lambda output: (loss_of(output), {"loss": output.sum()})

        reported, (gradient,) = step.gradient(forward_step, iter([batch_of(mindspore, PIXELS)]))
        assert float(reported) == pytest.approx(losses.sum(), rel=1e-6)
        np.testing.assert_allclose(gradient.asnumpy(), [derivative(losses) @ PIXELS], rtol=1e-5)
        found = step.of_samples(forward_step, iter([batch_of(mindspore, PIXELS)]))
        np.testing.assert_allclose(found.asnumpy(), losses, rtol=1e-6)


@pytest.mark.parametrize("pynative", [False, True])
def test_losses_count_as_the_batch_says(mindspore, composite, pynative):
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss, InterpretedLoss

    weight, counts = composite.predictor.trainable_params()[0], np.array([2.0, 0.5, 0.75], np.float32)
    weight.set_data(mindspore.Tensor(np.full((1, 2), 0.5, np.float32)))
    step = InterpretedLoss(composite, [weight]) if pynative else CompiledLoss(composite, [weight], 3)
    batch = {**batch_of(mindspore, PIXELS), "loss_weights": mindspore.Tensor(counts)}
    reported, (gradient,) = step.gradient(lambda batches, model: (model(**batch), mean), iter([]))
    assert float(reported) == pytest.approx(float((PIXELS @ [0.5, 0.5] * counts).mean()), rel=1e-6)
    np.testing.assert_allclose(gradient.asnumpy(), [(counts / 3) @ PIXELS], rtol=1e-6)


def test_a_linear_loss_runs_the_network_once_and_another_one_twice(mindspore, composite, monkeypatch):
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss

    def runs(loss_func, steps):
        step, count = CompiledLoss(composite, composite.predictor.trainable_params(), 3), 0
        run = step._run

        def counted(weights, inputs):
            nonlocal count
            count += 1
            return run(weights, inputs)

        monkeypatch.setattr(step, "_run", counted)
        for _ in range(steps):
            step.gradient(lambda batches, model: (model(**batch_of(mindspore, PIXELS)), loss_func), iter([]))
        return count

    assert runs(mean, 3) == 3
    assert runs(lambda output: ((output * 2.0).sum(), {"loss": output.mean()}), 3) == 1 + 3  # learned in the first
    composite.predictor.trainable_params()[0].set_data(mindspore.Tensor(np.ones((1, 2), np.float32)))
    assert runs(lambda output: ((output * output).sum(), {"loss": output.mean()}), 1) == 2


@pytest.mark.parametrize(
    ("forward_step", "message"),
    [
        (lambda batch: lambda batches, model: (model(**batch) + model(**batch), mean), "calls the model 2 times"),
        (lambda batch: lambda batches, model: (batch["pixels"][:, 0], mean), "calls the model 0 times"),
        (
            lambda batch: lambda batches, model: (model(**{name: x[:2] for name, x in batch.items()}), mean),
            "with 2 samples: a compiled step needs whole micro-batches, of 3",
        ),
    ],
)
def test_what_a_script_cannot_do_here_is_refused_by_name(mindspore, composite, forward_step, message):
    from mindspeed_mm_dit.errors import ConfigError
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss

    step = CompiledLoss(composite, composite.predictor.trainable_params(), 3)
    with pytest.raises(ConfigError, match=message):
        step.gradient(forward_step(batch_of(mindspore, PIXELS)), iter([]))
