"""A predictor, an objective and encoders from outside the package, known to every command.

With every part that fits them they are trained and sampled in tests/test_cross_product.py.
"""

import dataclasses
import json

import numpy as np
import pytest

from mindspeed_mm_dit.cli.sample import add_sampling_flags
from mindspeed_mm_dit.configs.arguments import Parser
from mindspeed_mm_dit.configs.model import PREDICTOR_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.integrations.formats.single_files import read_pt
from mindspeed_mm_dit.models.meta import forward_pass, parameters_of
from mindspeed_mm_dit.models.registry import AUTOENCODERS, TEXT_ENCODERS
from mindspeed_mm_dit.objectives.registry import OBJECTIVES, Sampler
from mindspeed_mm_dit.optimizers.registry import OPTIMIZERS
from mindspeed_mm_dit.registry import register
from tests.external import plugin, predictor
from tests.training.launch import Configs, plugged

PREDICTOR = {"model_id": "residual", "side": 8, "classes": 10, "in_channels": 1}
FLOW = {"model_id": "flow_matching"}
DENOISE = {"model_id": "denoise", "strength": 0.25}


@pytest.fixture
def joined():
    plugin.register()
    yield
    del PREDICTOR_CONFIGS["residual"], OBJECTIVES["denoise"], OPTIMIZERS["lion"]
    del AUTOENCODERS["folded"], TEXT_ENCODERS["letters"]


@pytest.fixture
def config(joined, model_json):
    return model_config_from_mapping({**model_json, "predictor": PREDICTOR, "diffusion": FLOW}, "model.json")


@dataclasses.dataclass
class Thawed:
    model_id: str = "mine"


class Short(predictor.ResidualConfig):
    num_tokens = PredictorConfig.num_tokens  # (abstract there)


@pytest.mark.parametrize(("kind", "message"), [
    (Short, "Short, which lacks num_tokens"), (object, "object, which lacks @dataclass"),
    (Thawed, r"Thawed, which lacks @dataclass\(frozen=True\)"),
    ("broken_plugin:Config", r"predictor 'mine' \(broken_plugin:Config\).*SyntaxError"),
])  # fmt: skip
def test_what_a_faulty_plugin_lacks_is_said(model_json, tmp_path, monkeypatch, kind, message):
    (tmp_path / "broken_plugin.py").write_text("class Config(:")
    monkeypatch.syspath_prepend(tmp_path)
    register("predictor", "mine", kind)
    try:
        with pytest.raises(PlatformError, match=message):
            model_config_from_mapping({**model_json, "predictor": {**PREDICTOR, "model_id": "mine"}}, "model.json")
    finally:
        del PREDICTOR_CONFIGS["mine"]


@pytest.fixture
def configs(tmp_path, digits_folder):
    """Config files whose model.json names the predictor of a package that is installed for ``mm_dit`` alone."""
    configs = Configs.create(tmp_path / "configs", digits_folder)
    model = json.loads((configs.folder / "model.json").read_text())
    (configs.folder / "model.json").write_text(json.dumps({**model, "predictor": PREDICTOR, "diffusion": DENOISE}))
    return configs


@pytest.fixture
def path(tmp_path):
    return plugin.install(tmp_path / "site")


FLAGS = "--lr 1e-3 --lr-decay-style constant --global-batch-size 8 --log-interval 1"


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.pytorch
@pytest.mark.parametrize("sharded", [False, True])
def test_a_run_trains_it_resumes_it_and_every_command_knows_it(configs, path, tmp_path, sharded):
    fsdp2 = configs.folder / "fsdp2.yaml"
    fsdp2.write_text("sharding_size: auto\nsub_modules_to_wrap:\n  - predictor.stages.{*}\n")
    flags = f"{FLAGS} --use-torch-fsdp2 --fsdp2-config-path {fsdp2}" if sharded else FLAGS
    whole = configs.done(f"{FLAGS} --train-iters 4", PYTHONPATH=path)
    saved = tmp_path / "checkpoints"
    first = configs.run(f"{flags} --train-iters 2 --save {saved}", 2, PYTHONPATH=path)
    last = configs.run(f"{flags} --train-iters 4 --save {saved} --load {saved}", 2, PYTHONPATH=path)
    assert last.code == 0, first.output + last.output
    for iteration, loss in (first.losses | last.losses).items():
        assert loss == pytest.approx(whole.losses[iteration], rel=2e-6), iteration
    if sharded:
        return
    plugged(path, "sample", "--checkpoint", saved, "--classes", "3", "--steps", "3", "--output", tmp_path / "three.png")
    machine = ("--global-batch-size", "8", "--world-size", "1", "--device-memory-gib", "8")
    plugged(path, "sample", "--checkpoint", saved, "--classes", "3", "--steps", "3", "--share", "0.5",
           "--output", tmp_path / "half.png")  # fmt: skip
    assert (tmp_path / "half.png").read_bytes() != (tmp_path / "three.png").read_bytes()
    assert "in each of 2 blocks" in plugged(path, "plan", "--model", configs.folder / "model.json", *machine)
    plugged(path, "convert", saved, tmp_path / "one.pt")
    plugged(path, "convert", tmp_path / "one.pt", tmp_path / "two", "--to", "mindspore",
           "--model", configs.folder / "model.json")  # fmt: skip
    plugged(path, "convert", tmp_path / "two", tmp_path / "three.pt")
    one, three = (read_pt(tmp_path / f"{name}.pt").trees["ema"] for name in ("one", "three"))
    assert one.keys() == three.keys() and all(np.array_equal(one[name], three[name]) for name in one)


def test_an_option_that_is_a_flag_already_is_refused(joined, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Taken:
        seed: int = 0

    monkeypatch.setitem(OBJECTIVES["denoise"].samplers, "twice", Sampler(print, Taken))
    parser = Parser()
    parser.add_argument("--seed")
    with pytest.raises(ConfigError, match="'twice' has an option 'seed'"):
        add_sampling_flags(parser)


def test_predictor_takes_its_own_size_and_returns_what_it_says(config):
    own = config.predictor
    assert own.resized((1, 8, 8)) is own
    with pytest.raises(ConfigError, match=r"'residual' takes only .*\(1, 8, 8\), not \(1, 4, 8\)"):
        own.resized((1, 4, 8))
    with pytest.raises(ConfigError, match=r"residual:Residual.*returns \(1, 1, 8, 8\).*config says \(1, 3, 8, 8\)"):
        forward_pass(Narrow(side=8, classes=10, in_channels=1))


class Narrow(predictor.ResidualConfig):
    """Its config says that the network returns something else than it does."""

    out_channels = 3


@pytest.mark.parametrize(("body", "reason"), [
    ("forward(self, x, t, y): ops.reshape(x, (1, 7))", "in line 4.*ValueError"),
    ("forward(self, x, t): return x", "in its call.*TypeError"),
    ("forward(self, x, t, y): return None", "returns NoneType for a sample"),
    ("__init__(self, config): 1 / 0", "in line 4.*ZeroDivisionError"),
])  # fmt: skip
def test_a_network_that_fails_on_paper_is_named_with_its_line(tmp_path, monkeypatch, body, reason):
    name = f"broken_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        f"from mindspeed_mm_dit.framework import nn, ops\nclass Broken(nn.Module):\n"
        f"    def __init__(self, config): super().__init__()\n    def {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(predictor.ResidualConfig, "network", f"{name}:Broken")
    with pytest.raises(ConfigError, match=reason):
        forward_pass(predictor.ResidualConfig(side=8, classes=10, in_channels=1, width=len(body)))


def test_a_network_of_torch_layers_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(tmp_path)
    for row, (base, part, named) in enumerate((
        ("torch.nn.Module", "torch.nn.Linear(1, 1)", "is a torch.nn.modules.module.Module"),
        ("nn.Module", "torch.nn.Linear(1, 1)", "is a torch.nn.modules.linear.Linear"),
        ("nn.Module", "torch.nn.Parameter(torch.ones(1))", "is a torch.nn.parameter.Parameter"),
        ("object", "1", "is a torch_layers_"),
    )):  # fmt: skip
        (tmp_path / f"torch_layers_{row}.py").write_text(
            f"import torch\nfrom mindspeed_mm_dit.framework import nn\nclass Network({base}):\n"
            f"    def __init__(self, config):\n        super().__init__()\n        self.part = {part}\n"
        )
        monkeypatch.setattr(predictor.ResidualConfig, "network", f"torch_layers_{row}:Network")
        with pytest.raises(ConfigError) as raised:
            parameters_of(predictor.ResidualConfig(side=8, classes=10, in_channels=1, width=9 + row))
        assert named in str(raised.value) and "mindspeed_mm_dit.framework import nn" in str(raised.value)


@pytest.mark.pytorch
def test_a_plugin_that_fails_is_named(configs, tmp_path, framework):
    broken = plugin.install(tmp_path / "site", "tests.conftest:nothing")
    outcome = configs.run(f"{FLAGS} --train-iters 1 --ai-framework {framework.active()}", PYTHONPATH=broken)
    assert outcome.code == 2 and "plugin outside (tests.conftest:nothing) cannot be loaded" in outcome.output


def test_latents_of_an_autoencoder_are_shifted_and_scaled_and_come_back(framework, joined, model_json):
    from mindspeed_mm_dit.models.registry import load_autoencoder

    ae = {"model_id": "folded", "channels": 1, "shift_factor": 0.25}
    predictor = {**model_json["predictor"], "in_channels": 4, "input_size": 4}
    config = model_config_from_mapping({**model_json, "ae": ae, "predictor": predictor}, "m")
    assert config.sample_size == (8, 8)
    images = np.random.default_rng(0).uniform(-1, 1, (2, 1, 8, 8)).astype(np.float32)
    autoencoder = load_autoencoder(config.ae)
    latents = autoencoder.encode(framework.ops.tensor(images))
    assert framework.ops.numpy(latents)[:, 1, 2, 3] == pytest.approx((images[:, 0, 4, 7] - 0.25) * 2)
    assert framework.ops.numpy(autoencoder.decode(latents)) == pytest.approx(images, abs=1e-6)


def test_without_the_package_the_name_is_unknown(model_json, monkeypatch):
    monkeypatch.delitem(AUTOENCODERS, "folded", raising=False)  # (tests of other files may have registered it)
    with pytest.raises(ConfigError, match=r"ae\.model_id = 'folded' is unknown"):
        model_config_from_mapping({**model_json, "ae": {"model_id": "folded"}}, "m")
