"""README, docs, their site and notebooks: commands run or parse, links lead somewhere, the reference has all flags."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.cli.commands import COMMANDS
from mindspeed_mm_dit.cli.main import command_parser, main, parse
from mindspeed_mm_dit.configs.arguments import config_folder, embedded_configs, read_train_args
from mindspeed_mm_dit.configs.run import rows
from mindspeed_mm_dit.training.flags import full_parser
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import FRAMEWORK, ROOT
from tests.forked import PATIENCE_SECONDS
from tests.mindspore.launch import PYTHON, needs_mindspore
from tests.training.launch import run

pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="runs commands on PyTorch")
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "examples/digits_card.md",
         *sorted((ROOT / "docs").glob("*.md"))]  # fmt: skip
_TYPED = re.compile(r"(\w+=\S+ )*(\.venv/bin/)?(mm-dit|bash examples/dit/pretrain\.sh)\b")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)

PARSED = {
    "mm-dit train": "trains", "bash examples/dit/pretrain.sh": "trains", "python pretrain_dit.py": "trains",
    "mm-dit sample": "draws", "mm-dit init": "looks at images", "mm-dit plan": "plans", "mm-dit plot": "draws",
    "mm-dit evaluate": "draws", "mm-dit convert": "reads weights that are not here", "mm-dit compare": "trains twice",
    "mm-dit cache-latents": "reads data that are not here", "mm-dit prove": "trains", "mm-dit get": "downloads",
    "mm-dit replay": "wants a run that failed", "mm-dit app": "serves until it is stopped",
    "mm-dit data": "wants the config that mm-dit init writes", "mm-dit parity": "takes minutes, or MindSpore",
    "mm-dit ema": "wants averages that a long run has kept",
}  # fmt: skip
"""Beginning of a command whose flags are read, and what it takes more than that (some pages are typed, below)."""
NEEDS = re.compile(r"#.*(\bneeds |需要)|\bNNODES=")
"""What a laptop without a network lacks, as a page says it of a command, or a second machine: that is not typed."""
ELSEWHERE = {"make ": "sets up environments", "source .venv/bin/activate": "is of the shell",
             "pip install": "downloads", "export ": "is of the shell", ". ~/": "is of MindSpeed-MM",
             "torchrun": "is of MindSpeed-MM", "python -m mindspeed_mm_dit.integrations": "is of MindSpeed-MM",
             "bash tests/contract": "is of MindSpeed-MM", "python -m pytest": "runs tests",
             "python benchmarks": "takes an hour", "msrun": "is of MindSpore",
             "python examples": "wants a package of Debian", "sudo apt-get": "installs"}  # fmt: skip
"""Beginning of a command that is left to others, and why."""


def commands(page: Path, here: bool = False) -> list[str]:
    """The commands of a page's shell blocks, without variables, launchers and remarks.

    here: those of mm-dit or pretrain.sh alone, with their variables, that say nothing of what they need more, at their
    end or in the first line of the block.
    """
    found = []
    for language, block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines() if language == "bash" else ():
            if here and (NEEDS.match(block) or NEEDS.search(line) or not _TYPED.match(line) or " ... " in line):
                continue
            line = re.sub(r"(^|\s)#.*", "", line).replace(".venv/bin/", "" if "activate" not in line else ".venv/bin/")
            line = line if here else re.sub(r"^(\w+=(<[^>]*>|\S+) )+", "", line.strip())
            line = re.sub(r"^(torchrun|msrun) .*?-m mindspeed_mm_dit\.cli\.main -- ", "mm-dit ", line)
            found.extend([" ".join(line.split())] if line else [])
    return found


ALL = [pytest.param(command, id=f"{page.name}: {command[:60]}") for page in PAGES for command in commands(page)]


@pytest.mark.parametrize("command", ALL)
def test_a_command_of_the_docs_is_understood(command):
    if " ... " in f"{command} ":
        return  # an outline
    if any(command.startswith(start) for start in PARSED):
        read(shlex.split(command))
    else:
        assert any(command.startswith(start) for start in ELSEWHERE), "neither read nor left out by name"
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
        for file in re.findall(r"-r (\S+)", command):
            assert (ROOT / file).is_file()


TYPED = ["README", *(f"docs/{name}" for name in ("own_images", "data", "text_to_image", "fine_tuning", "sampling",
                                                 "evaluation", "training", "recipes", "mindspeed_mm", "prove",
                                                 "text_to_video")), "examples/digits_card"]  # fmt: skip
"""Pages that are typed by one who has had his first hour."""
ON_MINDSPORE = ["docs/mindspore"]
"""The same, where MindSpore is installed too."""
SHORT = {"train": "--train-iters 2 --lr-warmup-iters 0 --save-interval 1 --report-steps 1 --report always",
         "ema": "--std 0.1", "sample": "--steps 2", "init": "--device-memory-gib 8", "evaluate": "--num 20 --steps 1",
         "compare --model": f"--steps 1 --sample-steps 1 --mindspore-python {PYTHON}",
         "prove my_config": "--layouts '2 ranks, FSDP2'", "prove --run digits_card.md": "--at 20",
         "prove --run examples/digits_card.md": "--at 20"}  # fmt: skip
"""What makes a command short, and gives the same answer anywhere."""


def type_in_order(page: Path, folder: Path, *first: str) -> None:
    """Run ``first``, and then what a page says, in a folder; what it repeats, once."""
    for command in dict.fromkeys([*first, *commands(page, here=True)]):
        words = shlex.split(command)
        variables = dict(word.split("=", 1) for word in takewhile(lambda word: "=" in word, words))
        words = words[len(variables) :]
        name = "train" if words[0] == "bash" else words[1]
        words += [word for start, more in SHORT.items() if f"{name} {shlex.join(words[2:])} ".startswith(f"{start} ")
                  for word in shlex.split(more)]  # fmt: skip
        variables |= {"NPUS_PER_NODE": "2"} if "NPUS_PER_NODE" in variables else {}
        on_mindspore = "AI_FRAMEWORK" in variables or "--ai-framework" in words
        if name == "train" or on_mindspore:
            python = PYTHON if on_mindspore else sys.executable
            variables |= {"PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
            words = words if words[0] == "bash" else [python, "-m", "mindspeed_mm_dit", *words[1:]]
            done = run(words, folder, **variables)
            assert done.code == 0, f"{command}\n{done.output}"
        else:
            assert main(words[1:]) == 0, command


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The folder of one who has images of his own, with what his first hour has left in it."""
    here = tmp_path_factory.mktemp("docs")
    for name in ("examples", "tests", "docs", "examples/digits_card.md"):
        (here / Path(name).name).symlink_to(ROOT / name)
    for folder in ("my_images", "data/my_images", "my_captioned_images"):
        for name, level in (("cat", 40), ("dog", 200)):
            (here / folder / name).mkdir(parents=True)
            for number in range(20):
                pixels = np.full((32, 32, 3), level + number, np.uint8)
                Image.fromarray(pixels).save(here / folder / name / f"{number}.png")
                if folder == "my_captioned_images":
                    (here / folder / name / f"{number}.txt").write_text(f"a red {name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        type_in_order(ROOT / "docs/first_hour.md", here, "mm-dit train digits")  # (which is make demo)
    return here


def record_traces(here: Path) -> None:
    """Leave what two machines recorded of one step."""
    torch = pytest.importorskip("torch")
    for name in ("gpu", "npu"):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        with dit.record_trace(model, optimizer, f"{name}.trace") as watching:
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            watching.step(loss)


BEFORE = {"docs/prove": record_traces, "docs/data": lambda here: clip_configs(here, write_clips(here))}
"""What a page supposes that its reader has."""


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [*TYPED, *(pytest.param(name, marks=[pytest.mark.campaign, needs_mindspore]) for name in ON_MINDSPORE)]
)
def test_the_commands_of_a_page_can_be_typed_in_order(prepared, name, monkeypatch, tmp_path):
    page, here = ROOT / f"{name}.md", tmp_path / "here"
    shutil.copytree(prepared, here, symlinks=True)
    if name == "README":  # (it makes what the first hour made)
        shutil.rmtree(here / "my_config")
        shutil.rmtree(here / "outputs/my_config")
    monkeypatch.chdir(here)
    BEFORE.get(name, lambda here: None)(here)
    type_in_order(page, here)


def read(words: list[str]) -> None:
    if words[1] == "train" or words[1].endswith("pretrain.sh"):
        config, flags = (words[2], words[3:]) if words[1] == "train" else ("digits", words[2:])
        folder = config_folder("digits" if config.startswith("my_") else config)
        if "mindspeed-mm-native" not in flags:
            files = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]
            full_parser().parse_strictly([*files, *read_train_args(folder / "train.args"), *flags])
    elif words[0] == "python":
        full_parser().parse_strictly(words[2:])
    else:
        assert parse(words[1:]).command == words[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert target.startswith("http") or (file.exists() and (not anchor or anchor in anchors(file))), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(_BLOCK, "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


CHINESE = sorted([*ROOT.glob("*.zh-CN.md"), *ROOT.glob("docs/*.zh-CN.md")])


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_chinese_page_has_the_commands_of_the_english_one(chinese):
    english = chinese.with_name(chinese.name.replace(".zh-CN", ""))
    assert not english.is_file() or commands(english) == commands(chinese)


def test_the_docs_name_every_embedded_config():
    text = (ROOT / "docs/training.md").read_text()
    assert [name for name in embedded_configs() if f"`{name}`" not in text] == []


@pytest.mark.costly("the commands of the first hour run in order, and then the Python of the docs")
def test_python_of_the_docs_runs_as_printed(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    names: dict[str, object] = {}
    for language, block in _BLOCK.findall((ROOT / "docs/sampling.md").read_text()):
        if language == "python" and not block.startswith("# not run by the tests: "):
            exec(block.replace("range(100)", "range(2)").replace("steps=25", "steps=2"), names)
    assert Path("some.png").is_file() and Path("digits.png").is_file()


@pytest.fixture(scope="module")
def pages():
    """The pages that the site of docs/ makes of the code; make docs holds it to its links."""
    pytest.importorskip("griffe", reason="of requirements/docs.txt")
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "docs/site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    return site.generated()


def first_cells(text: str) -> dict[str, str]:
    """What a table calls its rows -> the row."""
    return {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}


def test_the_reference_has_every_flag_and_its_page_links_within_the_site(pages):
    there = first_cells(pages["reference/flags.md"])
    assert [row.word for row in rows() if row.word not in there] == []
    assert "`model.bf16`" in there["--bf16"] and "| `0.0` |" in there["--min-lr"] and "| required |" in there["--lr"]
    sections = dict(zip(COMMANDS, pages["reference/commands.md"].split("\n## ")[1:], strict=True))
    for name, text in sections.items():
        flags = [word for action in command_parser(name)._actions for word in action.option_strings[:1] if word != "-h"]
        assert text.startswith(f"mm-dit {name}\n") and [word for word in flags if word not in first_cells(text)] == []
    assert "](own_images.md)" in pages["index.md"] and "](docs/" not in "".join(pages.values())


def test_the_reference_has_every_key_of_the_embedded_configs_with_a_meaning(pages):
    text = pages["reference/keys.md"]
    for name in embedded_configs():
        for file in ("model.json", "data.json"):
            content = json.loads((config_folder(name) / file).read_text())
            keys = [key for section in content.values() if isinstance(section, dict) for key in section]
            assert [key for key in keys if key not in first_cells(text)] == []
    assert re.findall(r"\|\s+\|$", text, re.M) == []  # no key without a meaning


QUICK = {"STEPS, DRAW_STEPS = .*": "STEPS, DRAW_STEPS = 2, 2",
         "--train-iters": "--micro-batch-size 4 --global-batch-size 4 --lr-warmup-iters 0 --train-iters"}  # fmt: skip
SHOWS = {"images": "samples.path", "text_to_video": "digits-0000.gif"}
"""Of each notebook, a word of its last cell."""


@pytest.mark.extended
@pytest.mark.parametrize("name", SHOWS)
def test_a_notebook_runs_from_top_to_bottom_and_shows_pictures(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if name == "text_to_video":
        pytest.importorskip("av")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / f"examples/notebooks/{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "is kept without outputs"
    for cell in notebook.cells:
        for before, quick in QUICK.items():
            cell.source = re.sub(before, quick, cell.source)
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources=here).execute()
    last = notebook.cells[-1]
    pictures = [kind for output in last.outputs for kind in output.get("data", {}) if kind.startswith("image/")]
    assert SHOWS[name] in last.source and pictures
