"""What a checkpoint remembers: a resume says what has changed, refuses other classes, and knows the best checkpoint."""

import dataclasses
import io
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.checkpoint.store import BEST, CheckpointStore, find_checkpoint, read_classes, read_facts
from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.fsdp2 import AUTOCAST, FLOAT32
from mindspeed_mm_dit.configs.images import ClipsParam, DatasetParam
from mindspeed_mm_dit.configs.model import AE_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.run import MultiModalArguments, with_facts
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.data.sources import Rows
from mindspeed_mm_dit.errors import CheckpointError, ConfigError, DataError
from mindspeed_mm_dit.training import progress as saving
from mindspeed_mm_dit.training import resume as room
from mindspeed_mm_dit.training.data_set import check_classes, log_classes, log_copies_among
from mindspeed_mm_dit.training.flags import parse
from mindspeed_mm_dit.training.progress import Progress
from mindspeed_mm_dit.training.resume import ResumePoint, changes, check_restorable, run_facts
from tests.conftest import ROOT, run_config
from tests.data_fixtures import open_rows, split_rows

FLAGS = "--mm-model m --mm-data d --train-iters 9 --lr 1e-3 --global-batch-size 8 "


@pytest.fixture
def facts(monkeypatch):
    """The facts of a run with some flags and configs, as they come back from run.json."""
    monkeypatch.setattr(room.framework, "runtime", SimpleNamespace(versions=dict), raising=False)
    model_json = json.loads((ROOT / "examples/dit/model.json").read_text())

    def facts(flags="", ae=None, **mm):
        model = model_config_from_mapping(model_json, "model.json")
        whole = MultiModalArguments(
            dataclasses.replace(model, ae=dataclasses.replace(model.ae, **(ae or {}))),
            DataConfig(DatasetParam("images", 8)), None, model_json, FLOAT32, ("cat", "dog"), "6 images, 0123",
            "files 4567",
        )  # fmt: skip
        args = dataclasses.replace(parse((FLAGS + flags).split()), mm=dataclasses.replace(whole, **mm))
        check_restorable(args)
        return json.loads(json.dumps(run_facts(args, 3, 24)))

    return facts


NO_FACTS = [("classes", (1, 2)), ("classes", ("cat", None)), ("classes", (b"cat",)), ("classes", ("cat", math.nan)),
            ("classes", "cat"), ("model_json", [1]), ("model_json", {"note": {1, 2}})]  # fmt: skip


def test_a_fact_that_no_resume_would_read_is_named_before_the_run(facts):
    for name, value in NO_FACTS:
        with pytest.raises(ConfigError, match=r"^(classes|model) = .* in run\.json"):
            facts(**{name: value})


def test_what_a_run_keeps_is_what_its_resume_reads(facts, tmp_path, every):
    from hypothesis import strategies as st

    odd = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=3))
    names = st.lists(st.one_of(st.text(max_size=9), st.text(max_size=9), odd), max_size=4).map(tuple)
    notes = st.one_of(odd, st.text(max_size=9), st.dictionaries(st.text(max_size=3), odd, max_size=3))
    stds = st.lists(st.floats(0.001, 0.288), max_size=3, unique=True)

    @every(names, notes, st.integers(0, 2**63 - 1), st.floats(1e-38, 3e38), stds)
    def each(classes, note, seed, lr, stds):
        flags = f"--seed {seed} --lr {lr!r} " + (f"--power-ema-stds {' '.join(map(repr, stds))}" if stds else "")
        model_json = {**json.loads((ROOT / "examples/dit/model.json").read_text()), "note": note}
        try:
            kept = facts(flags, classes=classes, model_json=model_json)
        except ConfigError:
            return
        store = CheckpointStore(tmp_path, keep_last=1)
        store.begin(3)
        again = read_facts(store.commit(3, kept))
        assert json.dumps(again) == json.dumps(kept) and again["classes"] == list(classes)
        check_classes(again, classes, tmp_path)
        assert changes(again, kept) == []


FINE = ("--micro-batch-size 2", "--num-workers 0 --log-interval 7", "--lr-decay-iters 9", "--save-interval 2")


def test_flags_that_change_the_weights_are_said_and_no_others(facts):
    for flags in FINE:
        assert changes(facts(), facts(flags)) == [], flags
    for flags, *change in CHANGES:
        assert changes(facts(), facts(flags)) == [tuple(change)]


CHANGES = [
    ("--lr 2e-3", "--lr", "0.001", "0.002"),
    ("--global-batch-size 16", "--global-batch-size", "8", "16"),
    ("--seed 7", "--seed", "1234", "7"),
    ("--ema-decay 0.5", "--ema-decay", "0.9999", "0.5"),
    ("--train-iters 20", "--lr-decay-iters", "9", "20"),  # the decay ends there
    ("--min-lr 1e-5", "--min-lr", "0.0", "1e-05"),
    ("--lr-warmup-iters 4", "--lr-warmup-iters", "0", "4"),
    ("--weight-decay 0", "--weight-decay", "0.01", "0.0"),
    ("--clip-grad 0", "--clip-grad", "1.0", "0.0"),
    ("--adam-beta2 0.95", "--adam-beta2", "0.999", "0.95"),
]


def test_every_setting_that_is_compared_is_one_of_some_config():
    for names, configs in (
        (room._DATA_SETTINGS, [DatasetParam, ClipsParam]),
        (room._AE_SETTINGS, AE_CONFIGS.values()),
        (room._TEXT_SETTINGS, [UMT5Config]),
    ):
        known = {field.name for config in configs for field in dataclasses.fields(config)}
        assert set(names) <= known


def test_changed_images_autoencoders_precision_and_settings_are_said(facts):
    flipped = DataConfig(DatasetParam("elsewhere", 8, random_flip=True, valid_fraction=0.1))
    found = changes(facts(), facts(data_digest="7 images, 89ab", autoencoder="files cdef", data=flipped))
    settings = ["dataset_param.random_flip", "dataset_param.valid_fraction", "pictures", "autoencoder"]
    assert [change.what for change in found] == settings and found[2][1:] == ("6 images, 0123", "7 images, 89ab")
    assert [change[:2] for change in changes(facts(), facts(precision=AUTOCAST))] == [("precision", "float32")]


def test_what_a_checkpoint_does_not_say_has_not_changed(facts):
    here = facts("--lr 7 --seed 7")
    assert changes({}, here) == []  # MindSpeed-MM's own, or one that lost its run.json
    before = {"seed": 1, "global_batch_size": 8, "settings": None}  # one of an older version
    assert changes(before, here) == [("--seed", "1", "7")]


def test_the_autoencoder_of_a_run_is_a_digest_of_its_files(tmp_path, model_json):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.json").mkdir()
    model_json["ae"] = {"model_id": "autoencoder_kl", "from_pretrained": str(tmp_path)}
    model_json["predictor"] |= {"in_channels": 4}
    mm = MultiModalArguments(model_config_from_mapping(model_json, "m"), DataConfig(DatasetParam("i", 8)), None, {})
    images = {"classes": (), "data_digest": ""}
    with pytest.raises(DataError, match=r"notes\.json is a folder"):
        with_facts(mm, images)
    (tmp_path / "notes.json").rmdir()
    assert with_facts(mm, images).autoencoder == "files 44136fa355b3"  # SHA-256 of "{}"


def index_of(classes, per_class=20):
    labels = np.repeat(np.arange(len(classes)), per_class)
    return Rows(tuple(map(str, range(len(labels)))), {"label": labels}, tuple(classes))


def test_the_classes_of_a_run_are_said_with_their_images(capsys):
    log_classes(*split_rows(index_of(["cat", "dog", "élan"]), 0.05, seed=1), 3)
    said = capsys.readouterr()
    assert "0 cat (20), 1 dog (20), 2 élan (20)" in said.out and not said.err
    log_classes(*split_rows(index_of(["0", "1"]), 0.0, seed=1), 10)
    assert "num_classes = 10, and 8 classes have no images" in capsys.readouterr().err


def test_a_terminal_without_the_letters_gets_them_spelled_out(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    log_classes(index_of(["élan", "\udce9"]), index_of([], 0), 2)
    assert rb"0 \xe9lan (20), 1 \udce9 (20)" in shown.getvalue()


def test_classes_without_images_and_copies_are_named(tmp_path, capsys):
    for place in ("cat", "dog", "empty"):
        (tmp_path / place).mkdir()
    for name, shade in (("cat/0", 1), ("cat/1", 2), ("cat/2", 2), ("dog/0", 1), ("dog/1", 3)):
        Image.new("L", (8, 8), shade).save(tmp_path / f"{name}.png")
    index = open_rows(DatasetParam(str(tmp_path), 8), 4)
    log_classes(*split_rows(index, 0.4, seed=0), 4)
    log_copies_among(index)
    said = capsys.readouterr().err
    assert index.classes == ("cat", "dog") and "empty" in "".join(index.notes)
    assert "num_classes = 4, and 2 classes have no images" in said
    assert f"{tmp_path}/cat/0.png (0 cat)" in said and f"{tmp_path}/dog/0.png (1 dog)" in said


def test_swapped_and_renamed_classes_are_refused_and_others_taken(tmp_path):
    for before in (["dog", "cat"], ["cat", "bird"]):
        with pytest.raises(CheckpointError, match=rf"label .*{', '.join(before)}"):
            check_classes({"classes": before}, ("cat", "dog", "élan"), tmp_path)
    for facts in ({}, {"classes": []}, {"classes": ["cat", "dog"]}, {"classes": ["cat"]}):
        check_classes(facts, ("cat", "dog"), tmp_path)


@pytest.mark.ranks
def test_a_run_goes_on_with_the_classes_it_began_with_alone(tmp_path, tiny):
    configs = tiny.copy(tmp_path).change("model.json", predictor={"num_classes": 2})
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 50 * number).save(tmp_path / "images" / name / f"{number}.png")
    configs.change("data.json", dataset_param={"data_folder": str(tmp_path / "images"), "index": None})
    flags = "--micro-batch-size 4 --lr 1e-3 --save saved --load saved --train-iters "
    outcome = configs.done(flags + "1")
    kept = read_facts(find_checkpoint(tmp_path / "saved"))["classes"]
    assert kept == ["cat", "dog"] == list(read_classes(tmp_path / "saved"))
    (tmp_path / "images/cat").rename(tmp_path / "images/lion")
    outcome = configs.run(flags + "3")
    assert outcome.code == 2 and "has 'cat' as label 0" in outcome.output


class Writer:
    """Writes at once; what goes wrong shows later, as with a write in the background."""

    problem = None

    def __init__(self, in_background, when_failed):
        Writer.broken = False

    def copy_to_host(self, state):
        return state

    def write(self, state, path, when_complete):
        if Writer.broken:
            self.problem = OSError("full")
        else:
            when_complete()

    def wait(self):
        problem, self.problem = self.problem, None
        return problem


CHECKPOINTS = SimpleNamespace(Writer=Writer, entries_for_mindspeed_mm=lambda facts, config: {})


@pytest.fixture
def progress(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "run_facts", lambda args, iteration, samples: {"iteration": iteration})
    args = run_config(
        save=str(tmp_path), load=str(tmp_path), keep_last=1, save_retain_interval=None, no_async_save=True,
        no_save_optim=False, no_load_optim=False, global_batch_size=4,
        mm=SimpleNamespace(model=SimpleNamespace(predictor=None)),
    )  # fmt: skip
    engine = SimpleNamespace(state=lambda with_optimizer: {}, load=lambda path, with_optimizer: None)
    claim = FolderLock(args.save)
    claim.take()
    yield Progress(args, engine, CHECKPOINTS, claim)
    claim.release()


def validated(progress, *losses):
    for loss in losses:
        progress.advance()
        progress.keep_if_best(loss)


def test_every_smaller_loss_is_saved_and_only_the_smallest_stays(progress, tmp_path):
    store = CheckpointStore(tmp_path)
    validated(progress, 0.9, 0.5, 0.7, math.nan, 0.5)
    assert store.iterations() == [2]
    progress.try_save()
    assert store.iterations() == [2, 5] and find_checkpoint(tmp_path / "best") == store.path(2)
    validated(progress, 0.4)
    assert store.iterations() == [6] and read_facts(store.path(6))[BEST] == {"iteration": 6, "loss": 0.4}


def test_a_best_one_that_could_not_be_written_does_not_displace_the_one_before(progress, tmp_path):
    store = CheckpointStore(tmp_path)
    validated(progress, 0.9)
    Writer.broken = True
    validated(progress, 0.5)
    Writer.broken = False
    progress.advance()
    progress.try_save()
    assert store.iterations() == [1, 3] and find_checkpoint(tmp_path / "best") == store.path(1)
    validated(progress, 0.7)  # better than what is on disk
    assert find_checkpoint(tmp_path / "best") == store.path(4)


def test_a_resumed_run_knows_the_best_of_its_folder_and_of_no_other(progress, tmp_path):
    validated(progress, 0.9, 0.5)
    start = ResumePoint(CheckpointStore(tmp_path).path(2), 2, read_facts(CheckpointStore(tmp_path).path(2)))
    progress.restore(start)
    validated(progress, 0.6)
    assert CheckpointStore(tmp_path).iterations() == [2]
    progress._args = replace(progress._args, load="elsewhere")
    progress.restore(start)
    validated(progress, 0.6)
    assert find_checkpoint(tmp_path / "best").name == "iter_0000003"


def test_the_next_best_one_is_kept_if_the_best_could_not_be_written(progress, tmp_path):
    validated(progress, 0.9)
    Writer.broken = True
    validated(progress, 0.5)
    Writer.broken = False
    validated(progress, 0.6)
    assert find_checkpoint(tmp_path / "best") == CheckpointStore(tmp_path).path(3)
