"""Run scripts in the real host, from unpacked trees that environment variables name.

MINDSPEED_MM_HOME MINDSPEED_HOME MEGATRON_HOME   the trees (docs/mindspeed_mm.md has the versions)
MINDSPEED_MM_PYTHON                              a Python with the host's requirements and ours
NPU_ON_CPU                                       a folder with a torch_npu that answers on a CPU; not on an NPU
"""

import json
import os
import shutil
from functools import lru_cache
from pathlib import Path

import pytest

from tests.buckets_fixtures import SHAPES, write_pictures
from tests.conftest import ROOT
from tests.forked import DEVICE, Forked
from tests.training.launch import run_ranks

TREES = ("MINDSPEED_MM_HOME", "MINDSPEED_HOME", "MEGATRON_HOME")
NEEDED = (*TREES, "MINDSPEED_MM_PYTHON")
MISSING = [name for name in NEEDED if not os.environ.get(name)]

needs_trees = pytest.mark.skipif(bool(MISSING), reason=f"not set: {', '.join(MISSING)} (unpacked trees of the host)")
_HAS_DEVICE = os.environ.get("NPU_ON_CPU") and shutil.which("g++")
needs_device = pytest.mark.skipif(not _HAS_DEVICE, reason="not set: NPU_ON_CPU, or there is no g++")
ALWAYS = {"TORCHDYNAMO_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def on_a_device_apart(variables):
    """Return what has a run find the device of the tests where it would find a torch_npu that redirects its calls."""
    return {"PYTHONPATH": variables["PYTHONPATH"].replace(os.environ["NPU_ON_CPU"], DEVICE, 1)}


def tree(name):
    return Path(os.environ[name])


def tools_json():
    return tree("MINDSPEED_MM_HOME") / "mindspeed_mm/tools/tools.json"


def dcp_loader_of_mindspeed():
    """Return the source of what MindSpeed loads torch_dcp with; where it lies depends on its age."""
    own = tree("MINDSPEED_HOME") / "mindspeed/core/distributed/torch_fully_sharded_data_parallel/checkpointing.py"
    return (own if own.is_file() else tree("MINDSPEED_HOME") / "mindspeed/checkpointing.py").read_text()


@lru_cache(maxsize=1)
def environment():
    folders = [os.environ.get("NPU_ON_CPU"), *(os.environ[name] for name in TREES), str(ROOT)]
    path = os.pathsep.join(folder for folder in folders if folder)
    return {**os.environ, **ALWAYS, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "2"}


def run_python(words, folder, ranks=1, **extra):
    """Run the host's Python with ``words`` (a script and its flags, or -m and a module) in ``folder``."""
    return forked(os.environ["MINDSPEED_MM_PYTHON"], words, folder, {**environment(), **extra}, "old route", ranks)


def forked(python, words, folder, variables, imported, ranks):
    """Run ``words`` on ``ranks`` ranks, forked off a process that has made most of the imports."""
    imported = "standalone" if variables["PYTHONPATH"] == str(ROOT) else imported
    if words[0] == "-c":
        (folder / "code.py").write_text(words[1])
        words = [str(folder / "code.py"), *words[2:]]
    start = lambda location: Forked([python, *words], variables | location, str(folder), imported)  # noqa: E731
    return run_ranks(start, ranks)


def good(outcome):
    assert outcome.code == 0, outcome.output[-4000:]
    return outcome


FLAGS = "--micro-batch-size 4 --global-batch-size 8 --num-workers 0 --lr 1e-3 --lr-decay-style constant --ema-decay 0.9"
GLOO_ADDS_UP = "adds gradients up where FSDP2 asks for"


class TwoHosts:
    """One folder of configs, trained in either host."""

    def __init__(self, folder, digits, diffusion=None, **fsdp2):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = json.loads((ROOT / "examples/dit/model.json").read_text())
        self.model["predictor"].update(hidden_size=32, num_layers=2, num_heads=2)
        self.model["diffusion"] = diffusion or self.model["diffusion"]
        data = json.loads((ROOT / "examples/dit/data.json").read_text())
        data["dataset_param"]["data_folder"] = str(digits)
        wrapped = ["predictor.blocks.{*}", "predictor.final_layer"]
        sharding = {"sharding_size": "auto", "sub_modules_to_wrap": wrapped, **fsdp2}
        for name, content in (("model", self.model), ("data", data)):
            (folder / f"{name}.json").write_text(json.dumps(content))
        (folder / "fsdp2.yaml").write_text(json.dumps(sharding))  # JSON is YAML

    def train(self, host, iterations, flags="", ranks=1, **extra):
        """Run pretrain_dit.py in ``host`` ("standalone" or "mindspeed-mm") up to ``iterations``."""
        config = "--mm-model model.json --mm-data data.json --use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml"
        words = [*config.split(), *FLAGS.split(), "--train-iters", str(iterations), *flags.split(), "--host", host]
        if host == "mindspeed-mm":
            words += ["--mm-tool", str(tools_json())]
        else:
            extra = {"PYTHONPATH": str(ROOT), **extra}  # (without a torch_npu in sight)
        outcome = run_python([str(ROOT / "pretrain_dit.py"), *words], self.folder, ranks, **extra)
        if GLOO_ADDS_UP in outcome.output:  # (PyTorch 2.7.1, which the native engine takes; on a CPU)
            pytest.skip(f"the standalone host refuses FSDP2 here: gloo {GLOO_ADDS_UP} their average")
        return outcome


def several_shapes(folder):
    """Write pictures of three shapes and a data.json of buckets, and return its path."""
    data = {"data_folder": str(write_pictures(folder / "pictures")), "buckets": SHAPES, "bucket_group": 4}
    path = folder / "data.json"
    path.write_text(json.dumps({"dataset_param": {**data, "valid_fraction": 0.2}}))
    return path


def train_in_sora(folder, iterations):
    """Train in the host's own entry script, pretrain_sora.py, on the features in ``folder``/sora."""
    script = str(tree("MINDSPEED_MM_HOME") / "pretrain_sora.py")
    flags = (
        f"--mm-model sora/model.json --mm-data sora/data.json --mm-tool {tools_json()} {FLAGS} --log-interval 1 "
        f"--train-iters {iterations} --use-torch-fsdp2 --fsdp2-config-path fsdp2.yaml --ckpt-format torch_dcp "
        "--eval-iters 0 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights "
        "--weight-decay-exclude-modules .bias"
    )
    module = ["-m", "mindspeed_mm_dit.integrations.mindspeed_mm.megatron.run", script]
    launch = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return run_python([*module, *flags.split()], folder, **launch)
