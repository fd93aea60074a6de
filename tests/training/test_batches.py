"""Which batches a rank trains and validates on, and what a sample counts where losses count by their tokens."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.data import DataloaderParam, load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.run import MultiModalArguments
from mindspeed_mm_dit.data.order import BucketOrder
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.tools.visualize.plot import parse_losses, parse_validation, read_validation
from mindspeed_mm_dit.training import contract as stream
from mindspeed_mm_dit.training.contract import TokenWeightedSamples, train_valid_batches
from mindspeed_mm_dit.training.data_set import DataSet
from mindspeed_mm_dit.training.log import QUARTERS, RunLog, ValidationLoss, sums_by_quarter
from mindspeed_mm_dit.training.loggers.boards import TensorBoardLogger
from tests.buckets_fixtures import write_configs, write_pictures
from tests.conftest import run_config

TOKENS = np.repeat([4, 6, 9], [13, 21, 14])


@pytest.mark.parametrize(("micro", "ranks", "start"), [(4, 1, 0), (2, 2, 0), (1, 4, 0), (4, 4, 32)])
def test_by_token_a_steps_mean_is_one_over_its_tokens_however_it_is_cut(micro, ranks, start):
    order = BucketOrder(np.repeat([0, 1, 2], [13, 21, 14]), 4, seed=0, costs=TOKENS)
    samples = SimpleNamespace(order=order, batch=lambda sample_indices: {"row": order.images(sample_indices)})
    weighed, rounds = TokenWeightedSamples(samples, TOKENS, start, 16), 16 // micro // ranks
    streams = [order.micro_batches(start, micro, rank, ranks, rounds) for rank in range(ranks)]
    losses = np.random.default_rng(0).random(len(TOKENS))
    for step in range(4):
        batches = [weighed.batch(next(stream)) for stream in streams for _ in range(rounds)]
        found = np.mean([(losses[batch["row"]] * batch["loss_weights"]).mean() for batch in batches])
        own = order.images(np.arange(start + 16 * step, start + 16 * step + 16))
        assert len(set(TOKENS[own])) > 1
        assert found == pytest.approx(np.average(losses[own], weights=TOKENS[own]), rel=1e-6)


@pytest.fixture
def batches_of(tmp_path, monkeypatch):
    """Return steps of 8 of the rank of a run that goes on at sample 16, and what is held out, twice."""
    pictures = write_pictures(tmp_path / "pictures")
    configs = write_configs(tmp_path / "configs", pictures, valid_fraction=0.25, random_flip=False)
    model, data = load_model_config(configs / "model.json"), load_data_config(configs / "data.json")
    mm = MultiModalArguments(model, data, None, {})
    mm = dataclasses.replace(mm, data_set=DataSet(mm, 1))

    def batches_of(rank, ranks, steps=1, **flags):
        monkeypatch.setattr(runtime, "data_parallel_rank", lambda: rank)
        monkeypatch.setattr(runtime, "data_parallel_size", lambda: ranks)
        run = {"seed": 1, "micro_batch_size": 2, "global_batch_size": 8, "consumed_train_samples": 16, "num_workers": 0}
        training, held_out = train_valid_batches(run_config(mm=mm, **run, **flags))
        step = list(itertools.islice(training, 4 * steps // ranks))
        training.close()
        return step, [list(itertools.islice(held_out, 4 * steps // ranks)) for _ in range(2)]

    return batches_of


@pytest.mark.parametrize(
    ("device", "workers", "offloads", "prefetch", "loader"),
    [("cpu", 2, False, 4, "load_batches"), ("npu", 2, False, 4, "load_batches_in_process"),
     ("cuda", 12, False, 12, "load_batches_in_process"), ("npu", 0, False, 4, "load_batches"),
     ("npu", 2, True, 4, "load_batches")],
)  # fmt: skip
def test_batches_are_made_beside_an_accelerator(tmp_path, monkeypatch, device, workers, offloads, prefetch, loader):
    taken = []
    (tmp_path / "fsdp2.yaml").write_text(f"offload_to_cpu: {json.dumps(offloads)}")
    sharding = {"use_torch_fsdp2": True, "fsdp2_config_path": str(tmp_path / "fsdp2.yaml")}
    for name in ("load_batches", "load_batches_in_process"):
        monkeypatch.setattr(stream, name, lambda *given, name=name: taken.append((name, *given[2:])) or iter(()))
    monkeypatch.setattr(runtime, "device_type", lambda: device)
    data = SimpleNamespace(data=SimpleNamespace(dataloader_param=DataloaderParam()))
    args = run_config(mm=data, micro_batch_size=2, global_batch_size=4, **sharding)
    samples = SimpleNamespace(order=SimpleNamespace(micro_batches=lambda *of: iter(())))
    assert list(stream.BatchStream(args, samples, 0, workers)) == []
    assert taken == [(loader, workers, prefetch)]


def joined(batches, name):
    return sorted(row.tobytes() for batch in batches for row in batch[name])


def test_the_ranks_share_the_steps_of_one_and_every_validation_is_the_same(batches_of):
    step, (valid, again) = batches_of(0, 1)
    assert [len(batch["labels"]) for batch in step] == [2] * 4 and "loss_weights" not in step[0]
    (first, (first_valid, _)), (second, (second_valid, _)) = batches_of(0, 2), batches_of(1, 2)
    shared_step, shared_valid = first + second, first_valid + second_valid
    for name in ("noise", "pixels"):
        assert joined(valid, name) == joined(again, name) and not set(joined(valid, name)) & set(joined(step, name))
        assert joined(shared_step, name) == joined(step, name) and joined(shared_valid, name) == joined(valid, name)


def test_no_image_is_learned_that_is_held_out(batches_of):
    epochs, (valid, _) = batches_of(0, 1, steps=10)
    learned, held_out = set(joined(epochs, "pixels")), set(joined(valid, "pixels"))
    assert not learned & held_out
    assert (len(learned), len(held_out)) == (37, 13)


@pytest.fixture
def validation_data(tmp_path):
    """Return the configs of a run on some pictures that validates on those of another folder, with its settings."""
    model = write_configs(tmp_path, write_pictures(tmp_path / "pictures", {(8, 8): 20})) / "model.json"

    def data(**settings):
        (tmp_path / "data.json").write_text(json.dumps({"dataset_param": {"image_size": 8, **settings}}))
        return load_data_config(tmp_path / "data.json")

    def validation_data(folder, **settings):
        own, other = (data(data_folder=str(place)) for place in (tmp_path / "pictures", folder))
        own = dataclasses.replace(own, dataset_param=dataclasses.replace(own.dataset_param, **settings))
        return MultiModalArguments(load_model_config(model), own, None, {}, valid_data=other)

    return validation_data


def test_validation_data_apart_are_validated_on_whole_and_none_is_learned(validation_data, tmp_path, monkeypatch):
    for name in ("bright", "dark"):
        (tmp_path / "others" / name).mkdir(parents=True)
        Image.new("L", (8, 8), 255).save(tmp_path / "others" / name / "white.png")
    mm = validation_data(tmp_path / "others")
    mm = dataclasses.replace(mm, data_set=DataSet(mm, 1))
    args = run_config(mm=mm, micro_batch_size=2, global_batch_size=2, num_workers=0)
    training, held_out = train_valid_batches(args)
    learned, validated = ([next(iter(stream)) for _ in range(10)] for stream in (training, held_out))
    assert len(set(joined(learned, "pixels"))) == 20 and set(joined(validated, "pixels")) == {b"\xff" * 64}


def test_validation_data_that_do_not_match_are_refused(validation_data, tmp_path):
    for name in ("bright", "pale"):
        (tmp_path / "misnamed" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "misnamed" / name / "black.png")
    for folder, settings, named in (
        ("pictures", {"valid_fraction": 0.25}, "valid_fraction = 0.25 of --mm-data"),
        ("misnamed", {}, "has the classes bright, pale"),
    ):
        with pytest.raises(ConfigError, match=rf"--mm-valid-data .*{named}"):
            DataSet(validation_data(tmp_path / folder, **settings), 1)


def test_losses_count_by_their_tokens_where_that_is_asked_for(batches_of):
    step, (valid, _) = batches_of(0, 1, loss_by="token")
    weights = np.concatenate([batch["loss_weights"] for batch in step])
    tokens = np.concatenate([[batch["pixels"][0, 0].size // 16] * 2 for batch in step])
    np.testing.assert_allclose(weights, tokens / tokens.mean(), rtol=1e-6)
    assert len(set(tokens)) > 1 and "loss_weights" not in valid[0]


LOSS = ValidationLoss(0.25, {"0-25": 0.4, "25-50": 0.3, "50-75": 0.2, "75-100": 0.1})
LINE = (
    " validation loss at iteration 200 | loss value: 2.500000E-01 | noise 0-25% value: 4.000000E-01 |"
    " noise 25-50% value: 3.000000E-01 | noise 50-75% value: 2.000000E-01 | noise 75-100% value: 1.000000E-01 |"
)
READ = {
    "held-out images": {200: 0.25}, "noise 0-25%": {200: 0.4}, "noise 25-50%": {200: 0.3}, "noise 50-75%": {200: 0.2},
    "noise 75-100%": {200: 0.1},
}  # fmt: skip
NOTHING: dict[str, dict[int, float]] = {name: {} for name in READ}
OLD = " validation loss at iteration 200 | loss value: 2.500000E-01 |"
MEGATRON = " validation loss at iteration 200 on validation set | lm loss value: 2.5E-01 | lm loss PPL: 1.284025E+00 | "


def test_every_sample_counts_in_the_quarter_its_share_lies_in():
    shares = np.array([0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 0.9999, 1.0])
    sums = sums_by_quarter(2.0 ** np.arange(8), shares)
    np.testing.assert_array_equal(sums, [[1 + 2, 4, 8 + 16, 32 + 64 + 128], [2, 1, 2, 3]])


def test_mean_and_quarters_of_a_validation_hide_no_loss():
    draw = np.random.default_rng(0)
    losses, shares = draw.random(101), draw.random(101)
    parts = [sums_by_quarter(*part) for part in zip(np.split(losses, [7, 60]), np.split(shares, [7, 60]))]
    found = ValidationLoss.from_sums(sum(parts))
    counts = [((shares * 4).astype(int) == number).sum() for number in range(4)]
    assert found.mean == pytest.approx(losses.mean(), rel=1e-14)
    assert np.average([found.quarters[name] for name in QUARTERS], weights=counts) == pytest.approx(found.mean)
    for number, name in enumerate(QUARTERS):
        assert found.quarters[name] == pytest.approx(losses[(shares * 4).astype(int) == number].mean(), rel=1e-14)
    found = ValidationLoss.from_sums(sums_by_quarter(np.array([1.0, np.nan]), np.array([0.1, 0.9])))
    assert list(found.quarters) == ["0-25", "75-100"] and found.quarters["0-25"] == 1.0
    assert np.isnan(found.mean) and np.isnan(found.quarters["75-100"])


def test_the_line_begins_as_megatrons():
    assert LOSS.line(200) == LINE and LINE.startswith(OLD)


@pytest.mark.parametrize(("line", "found"), [
    (LINE, READ),
    (OLD, {**NOTHING, "held-out images": {200: 0.25}}),
    (MEGATRON, {**NOTHING, "held-out images": {200: 0.25}}),
    (LINE.replace("200 |", "200 on validation set |"), READ),
    (MEGATRON.replace("validation set", "test set"), NOTHING),
])  # fmt: skip
def test_a_validation_is_read_from_its_line(line, found):
    assert parse_validation(["saved", line]) == found
    assert parse_losses([line]) == {}  # it is no loss of training


def test_a_validation_is_read_from_log_and_tensorboard_alike(tmp_path):
    log = RunLog(
        prints=True, metrics_loggers=[TensorBoardLogger(str(tmp_path / "board"), 0)], train_iters=3, iteration=0
    )
    log.validation(200, LOSS)
    log.close()
    (tmp_path / "log.txt").write_text(f"{LINE}\n")
    for place in ("board", "log.txt"):
        curves = read_validation(tmp_path / place)
        assert {c.label: dict(zip(c.steps.tolist(), np.float32(c.losses))) for c in curves} == {
            name: {200: np.float32(loss[200])} for name, loss in READ.items()
        }
    (tmp_path / "log.txt").write_text("nothing\n")
    assert read_validation(tmp_path / "log.txt") == []
