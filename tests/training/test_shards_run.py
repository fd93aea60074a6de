"""A run on shards prints the losses of a run on the same pictures as files, resumed and on two ranks too."""

from __future__ import annotations

import csv
import json

import pytest

from tests.data.test_sharded import write_tar
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2}
FLAGS = "--global-batch-size 64 --lr 1e-3 --lr-decay-style constant --train-iters "


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, digits_folder):
    """Configs of a run on the digits in four tar files, in the order of labels.csv."""
    folder = tmp_path_factory.mktemp("sharded")
    with open(digits_folder / "labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for shard in range(4):
        samples = [
            (
                row["image_path"],
                {".cls": row["label"].encode(), ".png": (digits_folder / row["image_path"]).read_bytes()},
            )
            for row in rows[shard * 500 : shard * 500 + 500]
        ]
        samples = [(key.removesuffix(".png").replace("/", "-"), files) for key, files in samples]
        write_tar(folder / f"digits/train-{shard:05d}.tar", samples)
    configs = Configs.create(folder, digits_folder, **SIZES)
    param = {"data_folder": "digits", "image_size": 8, "dataset_type": "webdataset"}
    (folder / "data.json").write_text(json.dumps({"dataset_param": param}))
    return configs


def test_a_run_on_shards_is_the_run_on_files(sharded, tmp_path, digits_folder):
    files = Configs.create(tmp_path, digits_folder, **SIZES).run(FLAGS + "4")
    assert files.code == 0 and len(files.lines) == 4, files.output
    first = sharded.run(FLAGS + "2 --save out")
    resumed = sharded.run(FLAGS + "4 --save out --load out")
    assert {**first.lines, **resumed.lines} == files.lines, resumed.output
    both = sharded.run(FLAGS + "4", ranks=2)
    assert both.losses == {step: pytest.approx(loss, rel=2e-6) for step, loss in files.losses.items()}, both.output
