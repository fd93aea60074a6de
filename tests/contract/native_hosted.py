"""Run scripts in the unmodified native engine, from unpacked trees that environment variables name.

MINDSPEED_MM_HOME MINDSPEED_HOME   the trees, with mindspeed_mm/fsdp and mindspeed/fsdp
MINDSPEED_MM_NATIVE_PYTHON         a Python with PyTorch 2.7.1 or 2.9.0; MINDSPEED_MM_PYTHON serves too if it has that
NPU_ON_CPU                         a folder with a torch_npu that answers on a CPU; not on an NPU
"""

import functools
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest

from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import KNOWN_TORCH, RELIED_ON, TRAINER
from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import COMMAND
from mindspeed_mm_dit.integrations.mindspeed_mm.native.run import as_text, parse, yaml_for
from mindspeed_mm_dit.training.launch import free_port
from tests.conftest import ROOT
from tests.contract.hosted import ALWAYS, TwoHosts, forked
from tests.training.launch import place_of

PYTHON = os.environ.get("MINDSPEED_MM_NATIVE_PYTHON") or os.environ.get("MINDSPEED_MM_PYTHON") or ""


@lru_cache(maxsize=1)
def missing():
    """Return what the engine needs and is not here; empty where all of it is."""
    lacking = [name for name in ("MINDSPEED_MM_HOME", "MINDSPEED_HOME") if not os.environ.get(name)]
    lacking += [] if PYTHON else ["MINDSPEED_MM_NATIVE_PYTHON"]
    if lacking:
        return f"not set: {', '.join(lacking)}"
    parts = [("MINDSPEED_MM_HOME", f"mindspeed_mm/{TRAINER}")]
    for module in RELIED_ON:
        home = "MINDSPEED_HOME" if module.startswith("mindspeed.") else "MINDSPEED_MM_HOME"
        parts.append((home, f"{module.replace('.', '/')}.py"))
    for name, part in parts:
        if not (Path(os.environ[name]) / part).exists():
            return f"{name} = {os.environ[name]} has no {part}"
    version = "import importlib.metadata; print(importlib.metadata.version('torch').partition('+')[0])"
    found = subprocess.run([PYTHON, "-c", version], capture_output=True, text=True, check=False).stdout.strip()
    return "" if found in KNOWN_TORCH else f"{PYTHON} has PyTorch {found or 'none'}, not {' or '.join(KNOWN_TORCH)}"


needs_engine = pytest.mark.skipif(bool(missing()), reason=f"{missing()} (MindSpeed-MM's native engine)")


def environment(**extra):
    folders = [os.environ.get(name) for name in ("NPU_ON_CPU", "MINDSPEED_MM_HOME", "MINDSPEED_HOME")]
    path = os.pathsep.join([folder for folder in folders if folder] + [str(ROOT)])
    return {**os.environ, **ALWAYS, "PYTHONPATH": path, **extra}


def run_python(words, folder, ranks=1, **extra):
    """Run the engine's Python with ``words`` in ``folder``; a rank alone is told its place too, as by torchrun."""
    location = place_of(0, 1, str(free_port())) if ranks == 1 else {}
    return forked(PYTHON, [*map(str, words)], folder, environment(**extra) | location, "engine", ranks)


COMPLAIN = """
import sys
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework import activate
activate("pytorch")
from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.integrations.mindspeed_mm.native import run
from mindspeed_mm_dit.training.resume import find_resume_point
for path in sys.argv[1:]:
    sys.argv[:] = ["trainer.py", path]
    try:
        run.begin(sys.argv)
        find_resume_point(run.current().flags, torch_dcp)
        print("no complaint of", path)
    except UserError as error:
        print(error.formatted)
"""
"""What the plugin does before a model is built, for one yaml after another: the engine is imported once for all."""

FLAGS = "--micro-batch-size 2 --global-batch-size 8 --num-workers 0 --lr 1e-3 --lr-decay-style constant --ema-decay 0.9"


class NativeAndStandalone(TwoHosts):
    """One folder of configs, trained in the native engine and in the standalone host."""

    def words(self, iterations, flags, fsdp2):
        sharding = ["--use-torch-fsdp2", "--fsdp2-config-path", "fsdp2.yaml"] if fsdp2 else []
        config = ["--mm-model", "model.json", "--mm-data", "data.json", *sharding]
        return [*config, *FLAGS.split(), "--train-iters", str(iterations), *flags.split()]

    def yaml(self, name, iterations, flags="", ranks=1, fsdp2=True, **keys):
        """Write the yaml of a run; ``keys``: what stands in it instead, "__" for the dots."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            content = yaml_for(parse(self.words(iterations, flags, fsdp2), ranks), ranks)
        for key, value in keys.items():
            *sections, leaf = key.split("__")
            location = functools.reduce(lambda inside, section: inside.setdefault(section, {}), sections, content)
            location[leaf] = value
        path = self.folder / f"{name}.yaml"
        path.write_text(as_text(content), encoding="utf-8")
        return path

    def engine(self, path, ranks=1, script="", **extra):
        """Run upstream's own trainer.py on a yaml; ``script``: Python that runs before it does."""
        trainer = Path(os.environ["MINDSPEED_MM_HOME"]) / "mindspeed_mm" / TRAINER
        words = [str(trainer), str(path)]
        if script:
            begin = self.folder / "begin.py"
            go_on = "import runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], {}, '__main__')"
            begin.write_text(f"{script}\n{go_on}")
            words.insert(0, str(begin))
        return run_python(words, self.folder, ranks, NON_MEGATRON="true", **extra)

    def checked_engine(self, path):
        """Run the trainer by the command that checks a yaml of one's own before upstream reads it."""
        return run_python(["-m", COMMAND, str(path)], self.folder)

    def complaints(self, paths):
        """Return what the plugin says of yamls before a model is built, in a process on one rank."""
        return run_python(["-c", COMPLAIN, *map(str, paths)], self.folder, NON_MEGATRON="true").output

    def train(self, host, iterations, flags="", ranks=1, fsdp2=True):
        """Run pretrain_dit.py in ``host``; the standalone one without MindSpeed-MM and a torch_npu in sight."""
        words = [*self.words(iterations, flags, fsdp2), "--host", host]
        alone = {"PYTHONPATH": str(ROOT)} if host == "standalone" else {}
        return run_python([str(ROOT / "pretrain_dit.py"), *words], self.folder, ranks, **alone)

    def copy(self, name, iteration):
        """Return the name of a folder with one of the checkpoints in the folder ``name``, as a run left it there."""
        location = self.folder / f"{name}_{iteration}"
        if not location.is_dir():
            shutil.copytree(self.folder / name / f"iter_{iteration:07d}", location / f"iter_{iteration:07d}")
            (location / TRACKER).write_text(f"{iteration}")
        return location.name
