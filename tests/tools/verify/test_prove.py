"""``mm-dit prove`` finds every planted fault of parallel training, names where it is, and calls nothing right wrong."""

import json
import os
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify import proof
from mindspeed_mm_dit.tools.verify.page import write_proof
from mindspeed_mm_dit.tools.verify.processes import StepResult
from mindspeed_mm_dit.tools.verify.proof import open_config
from mindspeed_mm_dit.tools.verify.prove import LAYOUTS, CrashedLayout, Layout, Verdict, chosen
from mindspeed_mm_dit.tools.verify.table import Finding
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import ROOT
from tests.contract.plants import AVERAGE
from tests.external import plugin
from tests.external.source import write_turned
from tests.mindspore.launch import PYTHON, needs_mindspore
from tests.tools.tables import refusals
from tests.tools.verify.campaign import PYTHONS, called_wrong, config_folder, truths_here
from tests.tools.verify.foreign import rows
from tests.tools.verify.forked_tasks import run_tasks
from tests.tools.verify.plants import DEVICE, FAULTS, ULYSSES, planted
from tests.training.launch import Configs, mm_dit

ABOUT = {"config": "mine", "model": "whole: 1,234 parameters", "data": "<b>digits</b>"}
RIGHT = [Finding("loss/1", 1e-8, 1e-6), Finding("loss/2", 1e-7, 1e-6), Finding("gradient/w", 2e-7, 4e-7, 1.0, 1.0)]
WRONG = [*RIGHT[:2], Finding("gradient/w", 1e-2, 4e-7, 1.0, 1.0)]
VERDICTS = [
    Verdict(Layout("whole batch"), RIGHT),
    Verdict(Layout("FSDP2", 2), WRONG, where="backward: module blocks.0"),
    Verdict(Layout("hybrid", 4), reason=CrashedLayout("its process crashed: bang")),
    Verdict(Layout("Ulysses", 2), reason="<this> predictor computes a sample on one rank"),
]


def written_page(tmp_path, verdicts):
    config = SimpleNamespace(about=ABOUT, samples=16, flags=["--lr", "1e-3"])
    write_proof(tmp_path / "new" / "proof.html", config, verdicts)
    return (tmp_path / "new" / "proof.html").read_text(), json.loads((tmp_path / "new" / "proof.json").read_text())


def test_page_escapes_words_and_holds_every_quantity(tmp_path, framework):
    page, found = written_page(tmp_path, VERDICTS)
    assert page.index("gradient/w, error 1.0e-02") < page.index("<h2>") and page.count("<tr class=bad>") == 2
    assert "&lt;this&gt; predictor" in page and "&lt;b&gt;digits" in page and "http" not in page
    assert [each["verdict"] for each in found["layouts"]] == ["PASS", "FAIL", "FAIL", "not proved"]
    assert found["about"]["flags"] == "--lr 1e-3" and found["layouts"][1]["quantities"][2]["good"] is False
    written_page(tmp_path, VERDICTS[3:])


def test_quantity_smaller_than_rounding_is_not_proved(tmp_path, framework):
    lost = [Finding("step/w", 0.9, 1.5, 1.0, 1.0), Finding("average/w", 1.0, 1.0, 1.0, 1.0)]
    layout = Layout("autocast", precision="bfloat16")
    some, none = Verdict(layout, [*RIGHT, *lost]), Verdict(layout, lost)
    assert (some.word, none.word, Verdict(layout, [Finding("step/w", 2.0, 1.5)]).word) == ("PASS", "not proved", "FAIL")
    _, found = written_page(tmp_path, [some])
    assert [each["good"] for each in found["layouts"][0]["quantities"]] == [True, True, True, "-", "-"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory, digits_folder):
    """A config of the first 64 pictures: each layout begins with a look at all of them."""
    folder = tmp_path_factory.mktemp("digits_config")
    rows = (digits_folder / "labels.csv").read_text().splitlines()[:65]
    for picture in [row.split(",")[0] for row in rows[1:]]:
        (folder / "few" / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(digits_folder / picture, folder / "few" / picture)
    (folder / "few/labels.csv").write_text("\n".join(rows))
    return config_folder(Configs.create(folder, folder / "few", hidden_size=32, num_layers=2, num_heads=2))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    pytest.importorskip("av", reason="requirements/video.txt")
    pytest.importorskip("transformers", reason="requirements/video.txt")
    place = tmp_path_factory.mktemp("clips_config")
    return config_folder(clip_configs(place, write_clips(place)))


def judged(given, folder, names, pythons=PYTHONS):
    """Take steps with each of the faults ``names`` planted; return what is found wrong, and where."""
    config, faults = open_config(given, folder, None, True, steps=2), {name: FAULTS[name] for name in names}
    truths = truths_here(config, [fault.layout for fault in faults.values()], watched=True)
    tasks = {name: config.task(fault.layout, name.replace(" ", "_"), watched=True) for name, fault in faults.items()}
    for ranks, framework in {(fault.layout.ranks, fault.layout.framework) for fault in faults.values()}:
        own = [tasks[name] for name, fault in faults.items() if fault.layout.ranks == ranks]
        run_tasks(ranks, framework, own, folder, pythons, ROOT / "tests/tools/verify/plants.py")
    found = {}
    for name, fault in faults.items():
        taken = StepResult.read(tasks[name])
        assert isinstance(taken, StepResult), (name, taken, *(each.read_text() for each in folder.glob("*.log")))
        truth = truths[fault.layout.reference_key]
        verdict = Verdict(fault.layout, truth.judge(fault.layout, taken))
        found[name] = replace(verdict, where=truth.first_wrong(verdict, taken))
    return found


def faults_of(framework):
    own = {name: fault.layout for name, fault in FAULTS.items() if fault.layout not in (ULYSSES, DEVICE)}
    return [name for name, layout in own.items() if layout.framework == framework]


def assert_named(name, found):
    named, where = FAULTS[name].named, FAULTS[name].where
    assert (found.word, found.named[: len(named)], found.location[: len(where)]) == ("FAIL", named, where)


@pytest.mark.pytorch
def test_every_fault_has_its_line(framework):
    for fault in (*FAULTS.values(), AVERAGE):
        with planted(fault):
            pass


@pytest.mark.extended
@pytest.mark.ranks
def test_fault_of_ranks_that_share_a_sample_is_found(clips, tmp_path):
    name = "RoPE's offset on the second rank"
    assert_named(name, judged(clips, tmp_path, [name])[name])


@pytest.mark.extended
def test_device_layout_needs_the_same_inputs_as_the_host(clips, tmp_path, monkeypatch):
    from mindspeed_mm_dit.framework.pytorch import runtime

    monkeypatch.setattr(runtime, "_cpu_only", False)
    with pytest.raises(ConfigError, match="layout device"):
        truths_here(open_config(clips, tmp_path, None, True, steps=1), chosen(["device"]))
    runtime.shutdown()


FEW = ("no all-reduce of one parameter", "a norm in bf16", "the backward of a layer", "EMA moved before the step")
"""One of each kind of finding."""


@pytest.fixture(scope="module")
def of_digits(digits, tmp_path_factory):
    """Names of faults -> what is found with each of them planted."""
    return cache(lambda names: judged(digits, tmp_path_factory.mktemp("proved"), names))


@pytest.mark.ranks
@pytest.mark.parametrize("name", rows(faults_of("pytorch"), FEW))
def test_fault_of_a_layout_is_found_and_named(of_digits, name):
    assert_named(name, of_digits(FEW if name in FEW else tuple(set(faults_of("pytorch")) - {*FEW}))[name])


@pytest.mark.extended
@pytest.mark.ranks
@needs_mindspore
def test_first_wrong_module_is_named_on_mindspore(digits, tmp_path):
    for name, found in judged(digits, tmp_path, faults_of("mindspore"), {"mindspore": PYTHON}).items():
        assert_named(name, found)


@pytest.mark.ranks
def test_right_step_passes_in_every_layout(digits, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(proof, "run_tasks", run_tasks)
    page, names = tmp_path / "proof.html", ["Muon", "pytorch-2-replicated", "FSDP2, bf16"]
    flags = ["--layouts", *names, "MindSpeed-MM, native*", "--steps", "1"]
    assert main(["prove", str(digits), "--output", str(page), *flags]) == 0, capsys.readouterr()
    found = json.loads(page.with_suffix(".json").read_text())
    verdicts = {each["layout"]: each for each in found["layouts"]}
    assert [each["verdict"] for each in verdicts.values()].count("PASS") == 3
    assert verdicts["2 ranks, MindSpeed-MM, native engine"]["verdict"] == "not proved"
    names = {quantity["name"] for quantity in verdicts["2 ranks, replicated"]["quantities"]}
    kinds = ("loss/1", "gradient norm/1", "gradient/blocks.0.attn.qkv.bias", "step/final_layer.linear.weight")
    assert names.issuperset(kinds) and "average/y_embedder.embedding_table.weight" in names


@refusals("""
nowhere | CONFIG = nowhere
examples/dit --layouts FSPD2 | --layouts = FSPD2
examples/dit/digits_flow --layouts device | --layouts = device
examples/dit --steps 0
examples/dit --steps 1000000000
examples/dit --output proof.pdf
--run README.md
--run nowhere | nowhere
--run examples/digits_card.md --at 7
--run examples/digits_card.md --at 1.5 | 1.5
--at 20 | CONFIG
digits --card card.md | --card
""")
def test_prove_refuses_before_any_work(flags, named, capsys, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.tools.verify.recompute.join", None)
    monkeypatch.chdir(ROOT)
    assert main(["prove", *flags.split()]) == 2
    assert named in capsys.readouterr().err


def test_missing_data_and_too_little_memory_are_refused(digits, tmp_path, capsys, monkeypatch):
    configs = Configs(digits).copy(tmp_path)
    configs.change("data.json", dataset_param={"data_folder": "gone"})
    assert main(["prove", str(config_folder(configs))]) == 2
    assert "gone" in capsys.readouterr().err
    monkeypatch.setattr(proof, "host_memory_bytes", lambda: 2**20)
    assert main(["prove", str(digits), "--full"]) == 2
    assert "Leave out --full" in capsys.readouterr().err


def test_narrowed_model_has_the_parameters_of_the_whole(tmp_path):
    image_to_video = WanConfig(in_channels=36, image_dim=1280, added_kv_proj_dim=5120, pos_embed_seq_len=514)
    for whole in (load_model_config(str(ROOT / "examples/dit/imagenet256/model.json")).predictor, image_to_video):
        small = whole.reduced_width()
        assert parameters_of(small).num_elements() < parameters_of(whole).num_elements() / 50
        ours, theirs = ({n.partition(".blocks.0.")[2] for n in parameters_of(m)} for m in (small, whole))
        assert ours == theirs
        assert small.head_dim == whole.head_dim and small.latent_shape == whole.latent_shape
    assert open_config(ROOT / "examples/dit", tmp_path, None, False, 1).about["model"].startswith("whole: 1,275,920")


SEVENTY = [("single", range(n, n + 10)) for n in range(0, 50, 10)] + [("joint", range(10)), ("joint", range(10, 20))]
SEVENTY = [pytest.param(*row, marks=pytest.mark.campaign) for row in SEVENTY]


@pytest.mark.ranks
@pytest.mark.parametrize(("kinds", "seeds"), [pytest.param("single", range(3), marks=pytest.mark.extended), *SEVENTY])
def test_right_layouts_of_random_architectures_pass(kinds, seeds, digits_folder, tmp_path):
    clips = write_clips(tmp_path) if len(seeds) > 3 else None
    assert called_wrong(seeds, tmp_path, digits_folder, clips, kinds) == {}


def test_crash_of_a_layout_stops_no_other(digits, tmp_path, monkeypatch):
    def run_until_the_second(ranks, framework, tasks, folder, pythons, script=None):
        for task in tasks:
            if "replicated,-micro" in task.output:
                return "exit code 1: RuntimeError: bang"
            Path(f"{task.output}.refused").write_text("not here")
        return ""

    monkeypatch.setattr(proof, "run_tasks", run_until_the_second)
    layouts = [each for each in LAYOUTS if each.ranks == 2 and each.framework == "pytorch"][:3]
    config = open_config(digits, tmp_path, None, False, steps=1)
    verdicts = proof.prove(config, layouts, PYTHONS, lambda text: None)
    assert [each.word for each in verdicts] == ["not proved", "FAIL", "not proved"]
    assert verdicts[1].reason == "its process crashed: exit code 1: RuntimeError: bang"


@pytest.mark.extended
@pytest.mark.ranks
def test_parts_of_another_package_are_proved(tmp_path, digits_folder):
    turned = {"model_id": "turned", "side": 8, "classes": 3, "in_channels": 1}
    configs = Configs.create(tmp_path / "configs", digits_folder)
    configs.change("model.json", predictor=turned, diffusion={"model_id": "denoise", "strength": 0.25})
    (configs.folder / "data.json").write_text(json.dumps({"dataset_param": write_turned(tmp_path, 24, 8)}))
    words = ["prove", str(config_folder(configs, "--optimizer lion\n")), "--output", str(tmp_path / "p.html")]
    path = os.pathsep.join([plugin.install(tmp_path / "site", "tests.external.plugin:register_rotary"), str(ROOT)])
    done = mm_dit(*words, "--layouts", "FSDP2, micro-batches, recompute", PYTHONPATH=path)
    assert done.code == 0 and "1 of 1 layouts are right" in done.output, done.output
