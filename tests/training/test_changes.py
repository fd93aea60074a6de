"""A resume says what has changed since the checkpoint was written, and nothing where nothing has."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest

from mindspeed_mm_dit.checkpoint.store import CheckpointStore, read_facts
from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.images import ClipsParam, DatasetParam
from mindspeed_mm_dit.configs.model import AE_CONFIGS, model_config_from_mapping
from mindspeed_mm_dit.configs.precision import AUTOCAST, FLOAT32
from mindspeed_mm_dit.configs.run import MultiModalArguments, with_facts
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.training import resume as room
from mindspeed_mm_dit.training.data_set import check_classes
from mindspeed_mm_dit.training.flags import parse
from mindspeed_mm_dit.training.resume import changes, check_restorable, run_facts
from tests.conftest import ROOT

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
        with pytest.raises(ConfigError, match=r"^run\.json: (classes|model) = "):
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


def test_what_does_not_change_the_weights_is_not_said(facts):
    for flags in FINE:
        assert changes(facts(), facts(flags)) == [], flags


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


def test_a_changed_flag_is_said(facts):
    for flags, *change in CHANGES:
        assert changes(facts(), facts(flags)) == [tuple(change)]


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
