"""README and docs: every command runs or parses, every link leads somewhere, both languages say the same."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main, parse
from mindspeed_mm_dit.configs.embedded import config_folder, embedded_configs
from mindspeed_mm_dit.configs.train_args import read_train_args
from mindspeed_mm_dit.training.flags import whole_parser
from tests.conftest import FRAMEWORK, ROOT
from tests.training.launch import Configs, mm_dit

pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="runs commands on PyTorch")
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)

RUN = {
    "mm-dit sample --checkpoint outputs/digits": "--steps 2 --num-per-class 1",
    "mm-dit convert outputs/digits": "",
    "mm-dit convert on-mindspore": "",
    "mm-dit convert NEW_FOLDER": "",
    "mm-dit init": "--device-memory-gib 8",
    "mm-dit plan": "",
    "mm-dit plot": "",
    "mm-dit parity --reference tests/golden/data/dit": "",
}
"""Beginning of a command that is run, in the process of the tests, and what makes it cheap there."""
PARSED = {
    "mm-dit train": "trains", "bash examples/dit/pretrain.sh": "trains", "python pretrain_dit.py": "trains",
    "mm-dit sample": "draws from weights that are not here", "mm-dit evaluate": "draws many images",
    "mm-dit convert": "reads weights that are not here", "mm-dit cache-latents": "reads data that are not here",
    "mm-dit compare": "trains twice", "mm-dit prove": "trains", "mm-dit replay": "wants a run that failed",
    "mm-dit app": "serves until it is stopped", "mm-dit data": "wants the config that mm-dit init writes",
    "mm-dit get": "downloads", "mm-dit init": "begins with weights that are not here",
    "mm-dit ema": "wants averages that a long run has kept", "mm-dit parity": "takes minutes, or MindSpore",
}  # fmt: skip
"""Beginning of a command whose flags alone are read, and why."""
ELSEWHERE = {
    "make ": "sets up environments", "source .venv/bin/activate": "is of the shell", "pip install": "downloads",
    "export ": "is of the shell", ". ~/": "is of MindSpeed-MM", "torchrun": "is of MindSpeed-MM",
    "python -m mindspeed_mm_dit.hosts": "is of MindSpeed-MM", "bash tests/contract": "is of MindSpeed-MM",
    "python -m pytest": "runs tests", "python benchmarks": "takes an hour", "msrun": "is of MindSpore",
}  # fmt: skip
"""Beginning of a command that is left to others, and why."""


def commands(page: Path) -> list[str]:
    """The commands of a page's shell blocks, without variables, launchers and remarks."""
    found = []
    for language, block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            line = re.sub(r"(^|\s)#.*", "", line).replace(".venv/bin/", "" if "activate" not in line else ".venv/bin/")
            line = re.sub(r"^(\w+=(<[^>]*>|\S+) )+", "", line.strip())
            line = re.sub(r"^(torchrun|msrun) .*?-m mindspeed_mm_dit\.cli\.main -- ", "mm-dit ", line)
            found.extend([" ".join(line.split())] if line else [])
    return found


ALL = [pytest.param(command, id=f"{page.name}: {command[:60]}") for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, digits_folder):
    """A folder as the docs suppose it: a run of the digits, images in two classes."""
    here = tmp_path_factory.mktemp("docs")
    for name in ("examples", "tests"):
        (here / name).symlink_to(ROOT / name)
    configs = Configs.create(here / "c", digits_folder, hidden_size=32, num_layers=1, num_heads=2)
    place = f"{here}/outputs/digits"
    (here / "my_config").mkdir()
    for folder in (here, here / "my_config"):
        shutil.copy(ROOT / "examples/dit/model.json", folder)
    flags = f"--train-iters 2 --micro-batch-size 8 --lr 1e-3 --log-interval 1 --tensorboard-dir {place}/tensorboard"
    assert configs.run(f"{flags} --save {place}/checkpoints").code == 0
    for folder in ("my_images", "data/my_images", "my_captioned_images"):
        for name, level in (("cat", 40), ("dog", 200)):
            (here / folder / name).mkdir(parents=True)
            for number in range(20):
                pixels = np.full((32, 32, 3), level + number, np.uint8)
                Image.fromarray(pixels).save(here / folder / name / f"{number}.png")
                if folder == "my_captioned_images":
                    (here / folder / name / f"{number}.txt").write_text(f"a red {name}")
    return here


@pytest.mark.parametrize("command", ALL)
def test_a_command_of_the_docs_runs_or_is_understood(prepared, command, monkeypatch):
    monkeypatch.chdir(prepared)
    if " ... " in f"{command} ":
        return  # an outline
    short = next((flags for start, flags in RUN.items() if command.startswith(start)), None)
    if short is not None and not re.search("digits_lora| --from ", command):  # (a run, and weights, of their own)
        argv = shlex.split(f"{command} {short}")[1:]
        if argv[0] == "convert" and not Path(argv[1]).exists():
            assert main(["convert", "outputs/digits/checkpoints", argv[1], "--to", "mindspore"]) == 0
        flags = ["--overwrite"] if argv[0] == "convert" else []
        shutil.rmtree(argv[argv.index("--output") + 1] if "--output" in argv else "none", ignore_errors=True)
        assert main([*argv, *flags]) == 0
    elif any(command.startswith(start) for start in PARSED):
        read(shlex.split(command))
    else:
        assert any(command.startswith(start) for start in ELSEWHERE), "neither run, nor read, nor left out by name"
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
        for file in re.findall(r"-r (\S+)", command):
            assert (ROOT / file).is_file()


IN_ORDER = {
    "train": "--train-iters 2 --report-steps 1 --report always --host standalone", "sample": "--steps 1",
    "init": "--device-memory-gib 8", "evaluate": "--num 20 --steps 1", "data": "",
}  # fmt: skip
"""Commands of a page's beginning, and what makes them short."""


@pytest.mark.parametrize("page", ["first_hour", "own_images", "text_to_image"])
def test_the_commands_with_which_a_page_begins_can_be_typed_in_order(prepared, page, monkeypatch, tmp_path):
    for name in ("my_images", "my_captioned_images", "data", "outputs"):
        shutil.copytree(prepared / name, tmp_path / name, ignore=shutil.ignore_patterns("my_c*"))
    monkeypatch.chdir(tmp_path)
    typed = [command for command in commands(ROOT / f"docs/{page}.md") if command.startswith("mm-dit")]
    typed = [command for command in typed if not re.search("mm-dit get|my_dit", command)]  # (weights of others)
    for command in typed[: 4 if page == "text_to_image" else None]:  # (what follows, too)
        words = [*shlex.split(command)[1:], *IN_ORDER[command.split()[1]].split()]
        if words[0] == "train":
            done = mm_dit(*words, folder=tmp_path)
            assert done.code == 0, done.output
        else:
            assert main(words) == 0, command


def read(words: list[str]) -> None:
    """Read the flags of a command as it would."""
    if words[1] == "train" or words[1].endswith("pretrain.sh"):
        config, flags = (words[2], words[3:]) if words[1] == "train" else ("digits", words[2:])
        folder = config_folder("digits" if config.startswith("my_") else config)
        if "mindspeed-mm-native" not in flags:
            files = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]
            whole_parser().parse_strictly([*files, *read_train_args(folder / "train.args"), *flags])
    elif words[0] == "python":
        whole_parser().parse_strictly(words[2:])
    else:
        assert parse(words[1:]).command == words[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(_BLOCK, "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_both_readmes_have_the_same_headings_commands_and_links():
    english, chinese = (page.read_text() for page in PAGES[:2])
    assert len(english.splitlines()) <= 150
    for pattern in (r"^(#+) ", r"\]\(((?!README)[^)]+\.(?:md|png)[^)]*)\)"):
        there = [one for one in re.findall(pattern, chinese, re.M) if "zh-CN" not in one]
        assert re.findall(pattern, english, re.M) == there
    assert commands(PAGES[0]) == commands(PAGES[1])


@pytest.mark.parametrize("chinese", sorted((ROOT / "docs").glob("*.zh-CN.md")), ids=lambda page: page.name)
def test_a_chinese_page_has_the_headings_and_commands_of_the_english_one(chinese):
    english = chinese.with_name(chinese.name.replace(".zh-CN", ""))
    if not english.is_file():
        pytest.skip("the guide is a page of its own")
    levels = [re.findall(r"^(#+) ", _BLOCK.sub("", page.read_text()), re.M) for page in (english, chinese)]
    assert levels[0] == levels[1] and commands(english) == commands(chinese)


def test_the_docs_name_every_embedded_config():
    text = (ROOT / "docs/training.md").read_text()
    assert [name for name in embedded_configs() if f"`{name}`" not in text] == []


def python_blocks() -> list[str]:
    blocks = [
        block for language, block in _BLOCK.findall((ROOT / "docs/python.md").read_text()) if language == "python"
    ]
    return [block for block in blocks if not block.startswith("# not run by the tests: ")]


def test_python_of_the_docs_runs_as_printed(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    names: dict[str, object] = {}
    for block in python_blocks():
        exec(block.replace("range(100)", "range(2)").replace("steps=25", "steps=2"), names)
    assert Path("some.png").is_file() and Path("digits.png").is_file()
