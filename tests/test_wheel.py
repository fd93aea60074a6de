"""What an installed wheel has and does: all of it, and the core alone."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from setuptools.build_meta import build_editable

from mindspeed_mm_dit.configs.arguments import embedded_configs
from tests.conftest import ROOT
from tests.mindspore.launch import PYTHON, needs_mindspore


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as its wheel installs it; the checkout is left as it was."""
    here = tmp_path_factory.mktemp("wheel")
    source = here / "source"
    for name in ("mindspeed_mm_dit", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "pretrain_dit.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(here), str(source)], check=True)
    wheel = next(here.glob("*.whl"))
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", str(here / "site"), str(wheel)], check=True)
    return here / "site"


@pytest.mark.costly("a wheel alone, installed, trains and samples")
@pytest.mark.ranks
def test_the_wheel_trains_an_embedded_config_from_an_empty_folder(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed), "CUDA_VISIBLE_DEVICES": ""}
    flags = "--train-iters 2 --log-interval 1 --global-batch-size 4 --host standalone"
    command = [sys.executable, str(installed / "bin/mm-dit"), "train", "digits", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "iteration        2/       2" in done.stdout and str(ROOT) not in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"data", "outputs"}


def test_the_wheel_carries_every_file_of_the_embedded_configs_and_templates_of_pages(installed):
    there = installed / "mindspeed_mm_dit/examples"
    for folder in embedded_configs().values():
        for file in folder.glob("*.*"):
            if file.suffix in (".json", ".yaml", ".args"):
                copy = there / file.relative_to(ROOT / "examples/dit")
                assert copy.read_bytes() == file.read_bytes()
    templates = "mindspeed_mm_dit/**/templates/*"
    ours, theirs = ({file.relative_to(root) for file in root.glob(templates)} for root in (ROOT, installed))
    assert ours == theirs and len(ours) > 5


def test_an_editable_clone_is_imported_from_its_parent_folder(tmp_path, monkeypatch):
    clone = tmp_path / "mindspeed_mm_dit"  # in tmp_path, a namespace package of the same name
    (clone / "mindspeed_mm_dit").mkdir(parents=True)
    for name in ("setup.py", "README.md", "pretrain_dit.py", "mindspeed_mm_dit/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    monkeypatch.chdir(clone)
    with zipfile.ZipFile(tmp_path / build_editable(str(tmp_path))) as wheel:
        (path_file,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        on_path = wheel.read(path_file).decode().split()
    spec = PathFinder.find_spec("mindspeed_mm_dit", [str(tmp_path), *on_path])
    assert spec.origin == str(clone / "mindspeed_mm_dit/__init__.py")


OF_WINGS = ("sklearn", "matplotlib", "tensorboard", "rich", "gradio", "diffusers", "transformers", "av", "pyarrow")
WINGS = ("mindspeed_mm_dit.tools", "mindspeed_mm_dit.integrations")  # which an editable installation would still find
WITHOUT = f"""\
from importlib.machinery import PathFinder
found = PathFinder.find_spec
def find_spec(_, name, path=None, target=None):
    is_hidden = name.partition(".")[0] in {OF_WINGS} or name.startswith({WINGS})
    return None if is_hidden else found(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture(scope="module")
def core(installed, tmp_path_factory) -> Path:
    """A folder with the core of the package, where no package is found that only a tool or an extra needs."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(installed, folder, dirs_exist_ok=True)
    for part in ("tools", "integrations"):
        shutil.rmtree(folder / "mindspeed_mm_dit" / part)
    (folder / "sitecustomize.py").write_text(WITHOUT)
    return folder


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize("framework", ["pytorch", pytest.param("mindspore", marks=needs_mindspore)])
def test_the_core_alone_trains_resumes_and_samples(core, few_digits, tmp_path, framework):
    python = PYTHON if framework == "mindspore" else sys.executable

    def mm_dit(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(core), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "mindspeed_mm_dit", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "sample" in mm_dit() and "evaluate" not in mm_dit()
    shutil.copytree(core / "mindspeed_mm_dit/examples", tmp_path / "config")
    data = {"dataset_param": {"dataset_type": "image_folder", "data_folder": str(few_digits), "image_size": 8}}
    (tmp_path / "config/data.json").write_text(json.dumps(data))
    flags = f"--save-interval 2 --log-interval 1 --global-batch-size 4 --ai-framework {framework} --report always"
    train = ["train", "config", *flags.split(), "--report-steps", "2", "--train-iters"]
    first = mm_dit(*train, "2")
    assert "iteration        2/       2" in first and "no report" in first and "loss curve" not in first
    assert "iteration        4/       4" in mm_dit(*train, "4")
    sample = ["sample", "--checkpoint", "outputs/digits", "--classes", "3,7", "--steps", "2", "--output", "some.png"]
    mm_dit(*sample, "--ai-framework", framework)
    assert (tmp_path / "some.png").is_file()
