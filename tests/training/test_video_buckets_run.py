"""Runs on images and videos of several shapes: a mix of both, and what ranks cannot share."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("av", reason="requirements/video.txt")

from tests.buckets_fixtures import write_clip_configs, write_clips, write_pictures
from tests.training.launch import Configs

pytestmark = pytest.mark.ranks

LOSS_TOLERANCE = 2e-6  # float32 sums in another order
STEPS = "--train-iters 6 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --num-workers 1 --eval-interval 6 "


def test_a_mix_of_images_and_videos_that_goes_on_with_two_ranks_trains_on_the_same_numbers(tmp_path):
    annotation, pictures = write_clips(tmp_path / "clips"), write_pictures(tmp_path / "pictures")
    for label, name in enumerate(("bright", "dark")):
        (pictures / name).rename(pictures / str(label))
    mix = Configs(write_clip_configs(tmp_path / "mix", annotation))
    data = json.loads((mix.folder / "data.json").read_text())
    clips = data["dataset_param"] | {"bucket_group": 2}
    images = {"data_folder": str(pictures), "buckets": [[8, 8], [8, 12]], "bucket_group": 2}
    data["dataset_param"] = {"sources": [clips, images], "weights": [3, 1], "valid_fraction": 0.1}
    (mix.folder / "data.json").write_text(json.dumps(data))
    whole = mix.run(STEPS + "--micro-batch-size 2")
    assert whole.code == 0 and "of a run" in whole.output, whole.output
    saving = STEPS.replace("iters 6", "iters 3", 1) + f"--micro-batch-size 2 --save {tmp_path}/run"
    assert mix.run(saving).code == 0
    rest = mix.run(STEPS + f"--micro-batch-size 1 --load {tmp_path}/run", 2)
    assert rest.losses == pytest.approx({n: whole.losses[n] for n in (4, 5, 6)}, rel=LOSS_TOLERANCE)
