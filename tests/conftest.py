"""Fixtures shared by all tests."""

import gc
import importlib
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_mm_dit.configs.run import RunConfig
from mindspeed_mm_dit.training.flags import full_parser
from tests.forked import DEVICE, GPUS, PATH, STARTED

ROOT = Path(__file__).parent.parent
FRAMEWORK = os.environ.get("MM_DIT_TEST_FRAMEWORK", "pytorch")
"""One process of tests runs on one framework."""
GOLDEN = ROOT / "tests" / "golden" / "data"
EXTENDED_PACKAGES = {"before", "contract", "device"}
"""Packages whose tests all belong to `make test-all`: older files, MindSpeed-MM's contracts, the mock accelerator."""
OFTEN = 20
"""So many answers of a small network that MindSpore interprets cost as much as to compile it."""

os.environ["CUDA_VISIBLE_DEVICES"] = GPUS  # before torch: on a machine with GPUs too, tests are of the CPU unless asked
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: as many runs at a time as there are cores
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # and no thread that spins while others work

# What a shell starts in the background ignores these; runs that tests start would inherit that, and not hear a Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # (as runs under nohup ignore it, and should)

pytest_plugins = ["tests.durations"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--extended", action="store_true", help="run the tests of `make test-all` too")
    parser.addoption("--campaign", action="store_true", help="the same, and every combination of the long campaigns")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their number: their content may differ from process to process."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def _is_extended(config: pytest.Config) -> bool:
    return bool(config.getoption("--extended") or config.getoption("--campaign"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the packages of tests that only `make test-all` runs."""
    return True if collection_path.name in EXTENDED_PACKAGES and not _is_extended(config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what belongs to a longer suite, to the other framework or, on a device, to the CPU."""
    markers = ["pytorch"] if FRAMEWORK == "mindspore" else ["mindspore"]
    markers += [] if config.getoption("--campaign") else ["campaign"]
    markers += [] if _is_extended(config) else ["extended"]
    markers += ["cpu"] if DEVICE in PATH or GPUS else []
    deselected = [item for item in items if any(map(item.get_closest_marker, markers))]
    if FRAMEWORK != "mindspore":
        deselected += [item for item in items if "mindspore" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=deselected)
    removed = set(deselected)
    items[:] = [item for item in items if item not in removed]


def run_config(**flags: Any) -> RunConfig:
    """Return a run with these flags, or other fields, and the defaults of all others."""
    defaults = {action.dest: action.default for action in full_parser()._actions if action.dest != "help"}
    return RunConfig.of({**defaults, **flags})


@pytest.fixture(params=[None, pytest.param(2000, marks=pytest.mark.campaign)], ids=["", "campaign"])
def every(request):
    """Return what runs a function on ``few`` examples that hypothesis draws, or with --campaign on 2,000."""
    hypothesis = pytest.importorskip("hypothesis", reason="pip install hypothesis")
    quiet = {"derandomize": True, "deadline": None, "database": None}
    quiet["suppress_health_check"] = list(hypothesis.HealthCheck)

    def every(*strategies, few=50):
        settings = hypothesis.settings(max_examples=request.param or few, **quiet)
        return lambda check: settings(hypothesis.given(*strategies)(check))()

    return every


@pytest.fixture(scope="session", autouse=True)
def freeze_imports():
    """Take what is imported out of the garbage collector's rounds, which makes the ones below cheap."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def free_memory_of_module():
    """Free what a file of tests leaves in reference cycles (networks with hooks), lest a worker grows to gigabytes."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    """End what a test has started and left running, having failed perhaps."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.kill()
    STARTED.clear()


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "dit_tiny_p2.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from mindspeed_mm_dit.tools.evaluate.demo import write_digits

    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder)
    return folder


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> Path:
    """The first 400 of them: a run looks at every image before it begins, which costs more than a few small steps."""
    folder = tmp_path_factory.mktemp("few_digits")
    header, *rows = (digits_folder / "labels.csv").read_text().splitlines(keepends=True)
    for row in rows[:400]:
        name = row.partition(",")[0]
        (folder / name).parent.mkdir(exist_ok=True)
        os.link(digits_folder / name, folder / name)
    (folder / "labels.csv").write_text("".join([header, *rows[:400]]))
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> Any:
    """Configs of a predictor small enough to run many steps in no time, and in auto.yaml a way to shard it."""
    from tests.training.launch import Configs

    configs = Configs.create(tmp_path_factory.mktemp("tiny"), few_digits, hidden_size=32, num_layers=2, num_heads=2)
    (configs.folder / "auto.yaml").write_text("sub_modules_to_wrap: ['predictor.blocks.{*}']\nsharding_size: auto\n")
    return configs


@pytest.fixture(scope="module")
def validated(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with images held out."""
    return tiny.copy(tmp_path_factory.mktemp("validated")).hold_out(0.1)


@pytest.fixture
def model_json() -> dict:
    """The embedded default's model.json."""
    return json.loads((ROOT / "examples/dit/model.json").read_text())


@pytest.fixture(scope="session")
def framework():
    """The active framework's ``nn``, ``ops`` and ``runtime``; skips where it is not installed."""
    from mindspeed_mm_dit import framework as seam
    from mindspeed_mm_dit.errors import PlatformError

    try:
        seam.activate(FRAMEWORK)
    except PlatformError as error:
        pytest.skip(str(error))
    return seam


@pytest.fixture
def mindspore(framework):
    """MindSpore, for tests of its side alone; skips where another framework is active."""
    if framework.active() != "mindspore":
        pytest.skip("asks for MM_DIT_TEST_FRAMEWORK=mindspore")
    return importlib.import_module("mindspore")


@pytest.fixture
def all_compiled():
    """Have every network compiled, as users do: asked for by one test of each kind of network."""


@pytest.fixture(autouse=FRAMEWORK == "mindspore")
def compiled_where_it_pays(framework, monkeypatch, request):
    """On MindSpore compile what is asked often, as by a walk, and interpret the first answers; not with --campaign.

    The step of a training run is compiled in any case.
    """
    if request.config.getoption("--campaign") or "all_compiled" in request.fixturenames:
        return
    mindspore = importlib.import_module("mindspore")

    def compiled(network):
        interpreted, asked = network.construct, Counter()
        often = mindspore.jit(interpreted)

        def construct(*inputs, **settings):
            shapes = tuple(x.shape for x in inputs)
            asked[shapes] += 1
            return (often if asked[shapes] > OFTEN else interpreted)(*inputs, **settings)

        network.construct = construct
        return network

    monkeypatch.setattr(framework.runtime, "jit_forward", compiled)


def gradient(framework, function, *arrays):
    """Gradients of the sum of ``function`` with respect to each of ``arrays``."""
    if framework.active() == "pytorch":
        inputs = [framework.ops.tensor(array).requires_grad_() for array in arrays]
        function(*inputs).sum().backward()
        return [x.grad.numpy() for x in inputs]
    import mindspore

    inputs = [framework.ops.tensor(array) for array in arrays]
    found = mindspore.grad(lambda *x: function(*x).sum(), tuple(range(len(inputs))))(*inputs)
    return [x.asnumpy() for x in (found if isinstance(found, tuple) else (found,))]
