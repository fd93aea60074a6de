"""One step on one rank, against AdamW, clipping and the moving average written out in NumPy."""

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32, Fsdp2Config
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import XAVIER_UNIFORM, ParameterSpec, ParameterSpecs
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.training.pytorch import engine as room
from mindspeed_mm_dit.training.pytorch.engine import Engine, check_sharding
from mindspeed_mm_dit.training.pytorch.stepper import PowerEmas
from tests.conftest import run_config

FLAGS = run_config(
    seed=3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3, weight_decay=0.1, ema_decay=0.75, clip_grad=1.0
)  # fmt: skip
WEIGHT = ParameterSpec((4, 3), XAVIER_UNIFORM, matrices=1)
PARAMETERS = ParameterSpecs({"linear.weight": WEIGHT, "linear.bias": ParameterSpec((4,))})
SHAPES = PARAMETERS.shapes()


def drawn(seed):
    return initial_weights(PARAMETERS, seed)


class Model(torch.nn.Module):
    """A composite whose predictor is one linear layer; a frozen parameter stands beside it."""

    def __init__(self):
        super().__init__()
        self.ae = self.diffusion = self.text_encoders = self.frames = self.image_features = None
        self.predictor = torch.nn.Module()
        self.predictor.linear = torch.nn.Linear(3, 4)
        self.predictor.table = torch.nn.Parameter(torch.full((2, 2), 7.0), requires_grad=False)

    @property
    def declared(self):
        return dict(PARAMETERS)

    def initial_weights(self, seed):
        return drawn(seed)

    def forward(self, x, y):
        return ((self.predictor.linear(x) - y) ** 2).mean(1)

    def predict(self, x):
        return self.predictor.linear(x)


def forward_step(batches, model):
    losses = model(*next(batches))
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def batches(count, size):
    """Micro-batches of 2 whose targets have ``size``, and so have the gradients."""
    draw = np.random.default_rng(0)
    return [
        (draw.standard_normal((2, 3)).astype(np.float32), size * draw.standard_normal((2, 4)).astype(np.float32))
        for _ in range(count)
    ]


def tensors(arrays):
    return iter([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in arrays])


@pytest.fixture
def engine(monkeypatch):
    """An engine whose step has 3 micro-batches, with weights so small that the targets decide the gradient's norm."""
    monkeypatch.setattr(room.runtime, "num_microbatches", lambda: 3)

    def build(fsdp2=None, precision=FLOAT32, **flags):
        engine = Engine(Model(), run_config(**{**FLAGS.flags(), **flags}), fsdp2, precision)
        with torch.no_grad():
            for parameter in (engine.predictor.linear.weight, engine.predictor.linear.bias):
                parameter *= 0.01
        return engine

    return build


class Reference:
    """The same optimizer in float64: Loshchilov & Hutter 2019, algorithm 2."""

    def __init__(self, clip):
        self.clip, self.steps = clip, 0
        start = {name: array * np.float32(0.01) for name, array in drawn(FLAGS.seed).items()}
        self.weights = {name: array.astype(np.float64) for name, array in start.items()}
        self.average = {name: array.astype(np.float64) for name, array in drawn(FLAGS.seed).items()}
        self.first, self.second = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))

    def loss(self, micro_batches):
        w, b = self.weights["linear.weight"], self.weights["linear.bias"]
        return np.mean([((x @ w.T + b - y) ** 2).mean() for x, y in micro_batches])

    def step(self, micro_batches, lr):
        w, b = self.weights["linear.weight"], self.weights["linear.bias"]
        errors = [(x, x.astype(np.float64) @ w.T + b - y) for x, y in micro_batches]
        loss = np.mean([(e**2).mean() for _, e in errors])
        gradient = {
            "linear.weight": np.mean([2 * e.T @ x / e.size for x, e in errors], 0),
            "linear.bias": np.mean([2 * e.sum(0) / e.size for _, e in errors], 0),
        }
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.steps += 1
        for name, g in gradient.items():
            self.first[name] = 0.8 * self.first[name] + 0.2 * scale * g
            self.second[name] = 0.9 * self.second[name] + 0.1 * (scale * g) ** 2
            corrected = (m / (1 - beta**self.steps) for m, beta in ((self.first[name], 0.8), (self.second[name], 0.9)))
            mean, variance = corrected
            self.weights[name] *= 1 - lr * (0.1 if name.endswith("weight") else 0.0)
            self.weights[name] -= lr * mean / (np.sqrt(variance) + 1e-3)
            self.average[name] = 0.75 * self.average[name] + 0.25 * self.weights[name]
        return loss, norm


@pytest.mark.parametrize(("size", "clip", "clipped"), [(9.0, 1.0, True), (0.1, 1.0, False), (9.0, 0.0, False)])
def test_a_step_is_adamw_on_the_mean_gradient_cut_to_its_largest_norm(engine, size, clip, clipped):
    ours, reference = engine(clip_grad=clip), Reference(clip)
    for lr in (0.01, 0.02, 0.005):
        micro_batches = batches(3, size)
        result = ours.train_step(forward_step, tensors(micro_batches), lr)
        loss, norm = reference.step(micro_batches, lr)
        assert result.loss.item() == pytest.approx(loss, rel=1e-5)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-5)
        assert (norm > 1.0) == (size > 1) and clipped == (norm > clip > 0)
    state = ours.state()
    for name in SHAPES:  # float32 against float64; a wrong factor anywhere is off by more than 1e-3
        np.testing.assert_allclose(state["model"][name], reference.weights[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(state["ema"][name], reference.average[name], rtol=1e-5, atol=1e-7)
        moments = state["optimizer"]["state"][name]
        np.testing.assert_allclose(moments["exp_avg"], reference.first[name], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(moments["exp_avg_sq"], reference.second[name], rtol=2e-5, atol=1e-10)
        assert moments["step"].item() == 3
    assert (state["model"]["table"] == 7).all() and (state["ema"]["table"] == 7).all()


def test_a_gradient_that_all_but_vanishes_is_cut_by_its_norm_and_a_millionth(engine):
    ours = engine(clip_grad=1e-6)
    weight, bias = (ours.predictor.linear.weight, ours.predictor.linear.bias)
    weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
    bias.grad[0] = 1e-6
    assert ours._clip().item() == pytest.approx(1e-6)
    assert bias.grad.tolist() == pytest.approx([0.5e-6, 0, 0, 0]) and not weight.grad.any()


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "fsdp2",
    [None, *(Fsdp2Config(sub_modules_to_wrap=("predictor.linear",), reshard_after_forward=on) for on in (True, False))],
    ids=["replicated", "resharded", "kept gathered"],
)
def test_the_average_stands_in_for_the_weights_while_it_is_asked_for(engine, group_of_one, fsdp2):
    """Before and after it the predictor answers by the weights, and takes the step that it takes without it."""
    asking, plain = engine(fsdp2=fsdp2), engine(fsdp2=fsdp2)
    ones = torch.eye(3)

    def answers(tree):
        state = {name: whole(value) for name, value in asking.state()[tree].items()}
        return ones @ state["linear.weight"].T + state["linear.bias"]

    for number in range(3):
        results = [each.train_step(forward_step, tensors(batches(3, 9.0)), 0.1) for each in (asking, plain)]
        assert whole(results[0].loss) == whole(results[1].loss)
        asking.eval_step(forward_step, tensors(batches(3, 9.0)))  # leaves weights gathered
        averages, weights = answers("ema").clone(), answers("model").clone()
        with suppress(ArithmeticError), asking.ema_weights(True) as model, torch.no_grad():
            torch.testing.assert_close(model.predictor(ones), averages, rtol=1e-6, atol=1e-7)
            if number == 1:
                raise ArithmeticError  # (as where samples are not finite, and the run goes on)
        with torch.no_grad():
            torch.testing.assert_close(asking.model.predict(ones), weights, rtol=1e-6, atol=1e-7)
        assert torch.equal(answers("model"), weights) and torch.equal(answers("ema"), averages)
        assert not torch.equal(averages, weights)


@pytest.mark.parametrize("size", [9.0, 0.1])
def test_a_sharded_step_is_the_same_step(engine, group_of_one, size):
    plain, sharded = engine(), engine(fsdp2=Fsdp2Config(sub_modules_to_wrap=("predictor.linear",)))
    assert isinstance(sharded.predictor.linear.weight, DTensor)
    for _ in range(2):
        micro_batches = batches(3, size)
        steps = [ours.train_step(forward_step, tensors(micro_batches), 0.01) for ours in (plain, sharded)]
        for expected, found in zip(*steps):
            assert found.item() == pytest.approx(expected.item(), rel=1e-6) and not isinstance(found, DTensor)
    wanted, state = torch_dcp._flatten(plain.state()), torch_dcp._flatten(sharded.state())
    assert wanted.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(whole(tensor), wanted[name], rtol=1e-6, atol=1e-9)


def test_a_backend_that_adds_up_where_it_is_asked_for_the_average_is_refused(engine, group_of_one, monkeypatch):
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        monkeypatch.setattr(torch.distributed, name, lambda own, given, **_: own.fill_(2), raising=False)
    with pytest.raises(PlatformError, match=rf"gloo of PyTorch {torch.__version__.split('+')[0]}.* adds them up"):
        engine(Fsdp2Config())


def test_a_gradient_of_just_the_allowed_norm_is_left_as_it_is(engine):
    """Twice the same step: the largest norm allowed is a hair above and a hair below the norm there is."""
    moments = {}
    micro_batches = batches(3, 9.0)
    norm = Reference(0.0).step(micro_batches, 0.01)[1]
    for factor in (1.001, 0.999, 0.5):
        ours = engine(clip_grad=factor * norm)
        ours.train_step(forward_step, tensors(micro_batches), 0.01)
        moments[factor] = ours.state()["optimizer"]["state"]["linear.weight"]["exp_avg"].norm().item()
    assert moments[0.999] == pytest.approx(0.999 * moments[1.001], rel=1e-5)
    assert moments[0.5] == pytest.approx(0.5 * moments[1.001], rel=1e-5)


def test_a_validation_is_the_loss_of_each_sample_and_changes_nothing(engine):
    ours, reference = engine(), Reference(1.0)
    micro_batches = batches(3, 2.0)
    losses = ours.eval_step(forward_step, tensors(micro_batches))
    each = [reference.loss([(x[None], y[None])]) for xs, ys in micro_batches for x, y in zip(xs, ys)]
    assert losses.tolist() == pytest.approx(each, rel=1e-5) and len(each) == 6 and not losses.requires_grad
    assert all(p.grad is None for p in ours.predictor.parameters())
    np.testing.assert_allclose(ours.state()["model"]["linear.weight"], reference.weights["linear.weight"], rtol=1e-6)


def test_a_fresh_state_holds_everything_a_resumed_run_needs(engine):
    ours = engine()
    state = ours.state()
    for tree in ("model", "ema"):
        assert sorted(state[tree]) == ["linear.bias", "linear.weight", "table"]
    assert sorted(state["optimizer"]["state"]) == ["linear.bias", "linear.weight"]
    for name, moments in state["optimizer"]["state"].items():
        assert {kind: tuple(x.shape) for kind, x in moments.items()} == {
            "step": (), "exp_avg": SHAPES[name], "exp_avg_sq": SHAPES[name],
        }  # fmt: skip
        assert not any(x.any() for x in moments.values())
        assert all(x.dtype == torch.float32 and x.device == ours.predictor.table.device for x in moments.values())
    assert "optimizer" not in ours.state(with_optimizer=False)
    ours.train_step(forward_step, tensors(batches(3, 1.0)), 0.01)
    assert all(moments["step"] == 1 for moments in ours.state()["optimizer"]["state"].values())
    assert state["model"]["linear.weight"].data_ptr() == ours.predictor.linear.weight.data_ptr()  # the live one
    assert ours.num_parameters() == 4 * 3 + 4 + 2 * 2


@pytest.mark.parametrize("bf16", [False, True])
def test_bf16_is_the_precision_of_products(engine, bf16):
    seen = []

    def noting(batches, model):
        out = model.predictor.linear(next(batches)[0])
        seen.append(out.dtype)
        return out, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    ours = engine(precision=AUTOCAST if bf16 else FLOAT32)
    ours.train_step(noting, tensors(batches(3, 1.0)), 0.01)
    ours.eval_step(noting, tensors(batches(3, 1.0)))
    assert seen == [torch.bfloat16 if bf16 else torch.float32] * 6
    assert ours.predictor.linear.weight.dtype == torch.float32


def test_the_weights_come_from_the_seed(monkeypatch):
    first, second = (Engine(Model(), replace(FLAGS, seed=seed), None) for seed in (3, 4))
    for name, array in drawn(3).items():
        np.testing.assert_array_equal(first.state()["model"][name], array)
    assert not torch.equal(first.predictor.linear.weight, second.predictor.linear.weight)


def bits(state):
    return {name: tensor.numpy().tobytes() for name, tensor in torch_dcp._flatten(state).items()}


def test_a_resumed_engine_takes_the_step_that_the_first_would_have_taken(engine, tmp_path):
    first, second, fresh = engine(), engine(seed=4), engine(seed=4)
    for _ in range(2):
        first.train_step(forward_step, tensors(batches(3, 9.0)), 0.02)
    torch_dcp.write(first.state(), tmp_path / "whole")
    second.load(tmp_path / "whole", with_optimizer=True)
    assert bits(second.state()) == bits(first.state())
    for ours in (first, second):
        ours.train_step(forward_step, tensors(batches(3, 1.0)), 0.02)
    assert bits(second.state()) == bits(first.state())
    fresh.load(tmp_path / "whole", with_optimizer=False)
    assert all(moments["step"] == 0 for moments in fresh.state()["optimizer"]["state"].values())
    torch_dcp.write(fresh.state(with_optimizer=False), tmp_path / "weights")
    second.load(tmp_path / "weights", with_optimizer=False)
    assert bits(second.state(with_optimizer=False)) == bits(fresh.state(with_optimizer=False))


def test_paths_of_fsdp2_yaml_are_checked_against_the_predictor_s_modules(model_json):
    config = model_config_from_mapping(model_json, "model.json")

    def check(*paths):
        check_sharding(SimpleNamespace(model=config, fsdp2=Fsdp2Config(sub_modules_to_wrap=paths)))

    check("predictor", "predictor.blocks.{*}", "predictor.blocks.0.attn.qkv", "predictor.final_layer")
    check_sharding(SimpleNamespace(model=config, fsdp2=None))
    for path in ("predictor.head", "blocks", ""):
        with pytest.raises(ConfigError, match="sub_modules_to_wrap"):
            check(path)


def test_averages_over_the_run_move_each_by_its_share_in_float32_at_least():
    weights = {"half": torch.ones(2, dtype=torch.bfloat16), "double": torch.ones(1, dtype=torch.float64)}
    averages = PowerEmas(weights, 2)
    for weight in weights.values():
        weight.fill_(5)
    averages.move([0.25, 1.0])
    state = averages.state()
    assert {name: [tensor.tolist() for tensor in tree.values()] for name, tree in state.items()} == {
        "power_ema_1": [[2, 2], [2]], "power_ema_2": [[5, 5], [5]]
    }  # fmt: skip
    assert [tensor.dtype for tensor in state["power_ema_1"].values()] == [torch.float32, torch.float64]
    averages.begin()
    assert [tensor.tolist() for tensor in averages.state()["power_ema_1"].values()] == [[5, 5], [5]]
