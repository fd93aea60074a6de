"""MindSpore's step: it clips as PyTorch's does, and descends the loss that the script computes, whatever that is."""

from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.power_ema import gamma_of_std
from mindspeed_mm_dit.configs.predictor import ParameterSpec
from mindspeed_mm_dit.errors import ConfigError
from tests.conftest import run_config

FLAGS = {"seed": 0, "pynative": True, "weight_decay": 0.0, "ema_decay": 0.5, "micro_batch_size": 1}


@pytest.fixture
def composite(mindspore, framework):
    """A composite whose network is x -> w x, and whose losses are those products."""

    class Composite(mindspore.nn.Cell):
        def __init__(self):
            super().__init__()
            self.predictor = framework.nn.Linear(2, 1, bias=False)
            self.calls_model = False
            self.declared = {"weight": ParameterSpec((1, 2))}

        def initial_weights(self, seed):
            return {"weight": np.full((1, 2), 0.5, np.float32)}

        def latents(self, batch):
            return batch["pixels"]

        def loss_inputs(self, batch):
            return tuple(batch[name] for name in ("labels", "timesteps", "noise"))

        def losses(self, latents, labels, timesteps, noise):
            return self.predictor(latents)[:, 0]

    return Composite()


def batch_of(mindspore, pixels):
    batch = {"pixels": pixels, **{name: [0] * len(pixels) for name in ("labels", "timesteps", "noise")}}
    return {name: mindspore.Tensor(np.array(array, np.float32)) for name, array in batch.items()}


def mean(output):
    loss = output.mean()
    return loss, {"loss": loss}


@pytest.fixture
def engine(mindspore, composite, monkeypatch):
    """An engine with these flags whose step has ``count`` micro-batches."""
    from mindspeed_mm_dit.training.mindspore.engine import Engine, runtime

    def engine(count=1, **flags):
        monkeypatch.setattr(runtime, "num_microbatches", lambda: count)
        return Engine(composite, run_config(**{**FLAGS, "clip_grad": 0.0, **flags}), None)

    return engine


@pytest.fixture(params=[False, True], ids=["compiled", "interpreted"])
def loss_of_script(request, mindspore, composite):
    """What makes the gradient of a loss that a script computes, by either way."""
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss, InterpretedLoss

    weights = composite.predictor.trainable_params()
    return InterpretedLoss(composite, weights) if request.param else CompiledLoss(composite, weights, 3)


@pytest.mark.parametrize(
    ("size", "clip", "kept"), [(0.01, 1.0, 0.01), (0.19, 1.0, 0.19), (1.0, 1.0, 0.2), (2.0, 0.0, 2.0)]
)
def test_a_gradient_is_cut_to_its_largest_norm_and_never_enlarged(mindspore, engine, size, clip, kept):
    batch, ours = batch_of(mindspore, np.array([[3.0, -4.0]]) * size), engine(2, clip_grad=clip)
    result = ours.train_step(lambda batches, model: (model(**batch), mean), None, 0.1)
    assert float(result.grad_norm) == pytest.approx(5 * size, rel=1e-6)
    first_moment = ours.state()["optimizer.state.weight.exp_avg"] / np.float32(0.1)
    np.testing.assert_allclose(first_moment, [[3.0 * kept, -4.0 * kept]], rtol=1e-5)


@pytest.mark.parametrize("pynative", [False, True])
def test_the_average_stands_in_for_the_weights(mindspore, composite, engine, pynative):
    composite.ae = composite.diffusion = composite.text_encoders = composite.frames = composite.image_features = None
    composite.predict = lambda x: composite.predictor(x)
    ours = engine(pynative=pynative, micro_batch_size=3)
    ones = mindspore.Tensor(np.eye(2, dtype=np.float32))
    for _ in range(2):
        ours.train_step(lambda batches, model: (model(**batch_of(mindspore, PIXELS)), mean), None, 0.1)
        state = ours.state()
        with ours.ema_weights(True) as model:
            np.testing.assert_array_equal(model.predictor(ones).asnumpy(), state["ema.weight"].T)
        np.testing.assert_array_equal(composite.predictor.weight.asnumpy(), state["model.weight"])
        assert (state["ema.weight"] != state["model.weight"]).all()
    with ours.ema_weights(False) as model:
        assert model is None


@pytest.mark.parametrize("pynative", [False, True])
def test_power_averages_are_sums_over_the_weights_of_all_steps(mindspore, engine, pynative):
    from mindspeed_mm_dit.training.callbacks.power_ema import PowerEmas

    stds, weights = (0.05, 0.2), []
    ours, callback = engine(pynative=pynative, micro_batch_size=3, power_ema_stds=stds), PowerEmas(stds)
    for iteration in range(1, 6):
        ours.train_step(lambda batches, model: (model(**batch_of(mindspore, PIXELS)), mean), None, 0.1)
        callback.after_step(SimpleNamespace(engine=ours, progress=SimpleNamespace(iteration=iteration)), None)
        state = ours.state()
        weights.append(state["model.weight"].astype(np.float64))
    for tree, std in (("power_ema_1", 0.05), ("power_ema_2", 0.2)):
        counted = np.diff((np.arange(6) / 5) ** (gamma_of_std(std) + 1))
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_gradient_is_that_of_the_loss_the_script_computes(mindspore, composite, loss_of_script, script):
    loss_of, derivative = SCRIPTS[script]
    (weight,) = composite.predictor.trainable_params()
    for value in ([[0.5, -1.0]], [[2.0, 0.25]]):  # the weights that went out of the first call go into the second
        weight.set_data(mindspore.Tensor(np.array(value, np.float32)))
        losses = PIXELS @ np.array(value[0])

        def forward_step(batches, model):
            return model(**next(batches)), lambda output: (loss_of(output), {"loss": output.sum()})

        reported, (gradient,) = loss_of_script.gradient(forward_step, iter([batch_of(mindspore, PIXELS)]))
        assert float(reported) == pytest.approx(losses.sum(), rel=1e-6)
        np.testing.assert_allclose(gradient.asnumpy(), [derivative(losses) @ PIXELS], rtol=1e-5)
        found = loss_of_script.sample_losses(forward_step, iter([batch_of(mindspore, PIXELS)]))
        np.testing.assert_allclose(found.asnumpy(), losses, rtol=1e-6)


def test_losses_count_as_the_batch_says(mindspore, composite, loss_of_script):
    counts = np.array([2.0, 0.5, 0.75], np.float32)
    composite.predictor.trainable_params()[0].set_data(mindspore.Tensor(np.full((1, 2), 0.5, np.float32)))
    batch = {**batch_of(mindspore, PIXELS), "loss_weights": mindspore.Tensor(counts)}
    reported, (gradient,) = loss_of_script.gradient(lambda batches, model: (model(**batch), mean), iter([]))
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


def test_what_a_script_cannot_do_here_is_refused_by_name(mindspore, composite):
    from mindspeed_mm_dit.training.mindspore.script_loss import CompiledLoss

    batch = batch_of(mindspore, PIXELS)
    short = {name: x[:2] for name, x in batch.items()}
    for output, named in (
        (lambda model: model(**batch) + model(**batch), "2 times"),
        (lambda model: batch["pixels"][:, 0], "0 times"),
        (lambda model: model(**short), "2 samples"),
    ):
        step = CompiledLoss(composite, composite.predictor.trainable_params(), 3)
        with pytest.raises(ConfigError, match=named):
            step.gradient(lambda batches, model, output=output: (output(model), mean), iter([]))
