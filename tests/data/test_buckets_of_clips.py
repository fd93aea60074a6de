"""Buckets of videos: which shape a clip is brought to, images among videos, and clips that are too short."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("av", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.data.buckets import nearest
from mindspeed_mm_dit.data.clip_reader import fit_frames, frame_numbers
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.buckets_fixtures import VIDEO_SHAPES, write_clip_configs, write_clips
from tests.conftest import GOLDEN
from tests.training.launch import Configs


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


def opened(folder, clips, predictor=None, **param):
    configs = write_clip_configs(folder, clips, predictor, **param)
    model = load_model_config(configs / "model.json")
    return open_data(model, load_data_config(configs / "data.json").dataset_param)


def test_clip_goes_to_the_nearest_shape_it_is_long_enough_for():
    shapes = np.array([[1, 8, 8], [5, 8, 12], [9, 8, 12], [9, 8, 8]])
    sizes = np.array([[1, 9, 40], [5, 8, 8], [8, 16, 24], [9, 16, 24], [30, 20, 20], [30, 8, 30]])
    assert nearest(sizes, shapes).tolist() == [0, 1, 1, 2, 3, 2]


def test_no_video_becomes_an_image_unless_all_shapes_are_of_one_frame():
    short = np.array([[4, 8, 8]])
    assert nearest(short, np.array([[1, 8, 8], [5, 8, 8], [3, 4, 12]])).tolist() == [2]
    assert nearest(short, np.array([[1, 12, 8], [1, 8, 8]])).tolist() == [1]


@pytest.mark.parametrize("clip_start", ["first", "random"])
def test_a_batch_has_frames_height_and_width_of_its_bucket(tmp_path, clips, clip_start):
    found = opened(tmp_path, clips, clip_start=clip_start)
    samples, seen = found.samples(found.rows, 7, True, training_draw(found.model.diffusion)), Counter()
    for start in range(0, len(samples.order), 4):
        sample_indices = np.arange(start, start + 4)
        batch, rows = samples.batch(sample_indices), samples.order.images(sample_indices)
        (shape,) = {tuple(shape) for shape in found.rows.shapes[rows].tolist()}
        assert batch["pixels"].shape == batch["noise"].shape == (4, 1, *shape)
        seen[shape] += 1
        for pixels, row in zip(batch["pixels"], rows) if shape[0] == 5 else ():
            frames = read_frames(found.rows.paths[row], frame_numbers(6, 1.0))
            levels = fit_frames(frames, shape[1:]).mean((0, 2, 3)).round()
            starts = [first for first in (0, 1) if (abs(pixels.mean((0, 2, 3)) - levels[first : first + 5]) < 2).all()]
            assert starts and (clip_start == "random" or starts == [0])
    assert seen.keys() == {tuple(shape) for shape in VIDEO_SHAPES}


def test_budget_makes_its_rectangles_for_every_number_of_frames(tmp_path, clips):
    budget = {"frames": [1, 5, 9], "area": 100, "multiple_of": 4}
    found = opened(tmp_path, clips, buckets=budget, bucket_group=7)
    assert set(found.param.sizes) == {(f, *size) for f in (1, 5, 9) for size in [(12, 8), (8, 12), (8, 8)]}
    counts = Counter(map(tuple, found.rows.shapes.tolist()))
    assert counts == {(1, 8, 8): 5, (5, 8, 12): 11, (9, 12, 8): 7}  # six are fewer than a group, and fit another shape


@pytest.mark.parametrize(("param", "message"), [
    ({"buckets": [[9, 8, 12], [9, 12, 8], [1, 8, 8]]}, r"5 of 23 clips cannot be used\n.*short-0.mp4 is short"),
    ({"buckets": [[5, 8, 12], [9, 12, 8]]}, "still-0.png has one frame, and no bucket has one frame"),
    ({"buckets": [*VIDEO_SHAPES, [9, 8, 80]]}, r"buckets: \[9, 8, 80\]: no sample is nearest to this shape"),
    ({"buckets": [[8, 12]]}, r"buckets\[0\] = \[8, 12\]: is not \[frames, height, width\]"),
    ({"buckets": {"area": 100, "multiple_of": 4}}, r"buckets.frames = \[\]: must list different numbers of frames"),
    ({"buckets": [[9, 8, 14]]}, "9 x 8 x 14: .*do not fit predictor.patch_size"),
    ({"max_width": 8}, "dataset_param.max_width = 8: contradicts buckets"),
    ({"buckets": None, "max_width": 8, "max_height": 8}, "dataset_param.num_frames: this key is required"),
])  # fmt: skip
def test_what_does_not_go_with_clips_is_named(tmp_path, clips, param, message):
    pytest.raises(UserError, opened, tmp_path, clips, **param).match(message)


def test_losses_of_cached_clips_equal_encoding_online(tmp_path):
    clips = write_clips(tmp_path / "clips", {"wide": (2, 5, (16, 24)), "still": (2, 1, (16, 16))})
    shapes = [[1, 8, 8], [5, 8, 16]]
    network = {"in_channels": 16, "out_channels": 16, "patch_size": [1, 1, 1], "latent_size": [2, 1, 2]}
    write_clip_configs(tmp_path, clips, network, buckets=shapes, bucket_group=2)
    ae = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")}
    Configs(tmp_path).change("model.json", ae=ae)
    argv = ["--model", f"{tmp_path}/model.json", "--data", f"{tmp_path}/data.json", "--output", f"{tmp_path}/cache"]
    assert main(["cache-latents", *argv, "--shard-images", "3"]) == 0
    model, param = load_model_config(tmp_path / "model.json"), load_data_config(tmp_path / "data.json").dataset_param
    online, cached = (
        (found := open_data(model, own)).samples(found.rows, 7, True, training_draw(model.diffusion))
        for own in (param, dataclasses.replace(param, features=str(tmp_path / "cache")))
    )
    torch.manual_seed(0)
    composite, seen = DiTModel(model), set()
    with torch.no_grad():
        for start in range(0, 4, 2):
            both = [samples.batch(np.arange(start, start + 2)) for samples in (online, cached)]
            frames, height, width = both[0]["pixels"].shape[2:]
            assert both[1]["latent_mean"].shape == (2, 16, (frames + 3) // 4, height // 8, width // 8)
            there, here = (composite(**runtime.to_device(batch)).numpy() for batch in both)
            np.testing.assert_allclose(there, here, rtol=2e-5)
            seen.add((frames, height, width))
    assert seen == set(map(tuple, shapes))
    with pytest.raises(ConfigError, match=r"was made with another size or crop: .*1 of 8 x 8 or 5 of 8 x 16"):
        open_data(model, dataclasses.replace(param, features=str(tmp_path / "cache"), buckets=((5, 8, 16),)))
