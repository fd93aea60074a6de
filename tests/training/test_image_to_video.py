"""Clips that begin with an image: training on a clip's own frames, and samples from an image that a user names."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.autoencoder import PixelConfig
from mindspeed_mm_dit.configs.condition import FirstFrame
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.models.autoencoder import to_images
from mindspeed_mm_dit.models.registry import check_encoders
from tests.clips_fixtures import NETWORKS, begun_configs, write_begun_clips, write_clip_vision
from tests.training.test_same_numbers import in_cache

pytestmark = pytest.mark.pytorch
STEPS = "--train-iters 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    pytest.importorskip("av", reason="requirements/video.txt")
    pytest.importorskip("transformers", reason="requirements/video.txt")
    return write_begun_clips(tmp_path_factory.mktemp("clips"))


@pytest.mark.parametrize("mask_channels", [1, 4])
def test_of_one_frame_or_one_that_is_not_kept_none_is_given(framework, mask_channels):
    from mindspeed_mm_dit.models.autoencoder import PixelAutoencoder
    from mindspeed_mm_dit.models.frames import frame_conditions

    autoencoder = PixelAutoencoder(PixelConfig(channels=1))
    model = SimpleNamespace(ae=autoencoder, latents=lambda batch: autoencoder.scaled(to_images(batch["pixels"])))
    for frames in (1, 5):
        pixels = framework.ops.tensor(np.full((2, 1, frames, 4, 4), 200, np.uint8))
        batch = {"pixels": pixels, "frames_kept": framework.ops.tensor(np.array([1, 0], np.float32))}
        found = framework.ops.numpy(frame_conditions(FirstFrame((1, 5, 4, 4), mask_channels), batch, model))
        assert found.shape == (2, mask_channels + 1, frames, 4, 4) and found[0].any() == (frames > 1)
        assert not found[1].any()


def test_features_are_the_states_before_clips_last_layer_of_a_square_of_its_size(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from mindspeed_mm_dit.configs.teacher import ImageEncoderConfig
    from mindspeed_mm_dit.models.registry import load_image_encoder

    config = ImageEncoderConfig(**write_clip_vision(tmp_path, 8))
    images = torch.rand((2, 3, 8, 12), generator=torch.Generator().manual_seed(0)) * 2 - 1
    square = torch.nn.functional.interpolate(images / 2 + 0.5, (8, 8), mode="bicubic")
    normal = (square - torch.tensor(config.pixels[0])[:, None, None]) / torch.tensor(config.pixels[1])[:, None, None]
    module = transformers.CLIPVisionModel.from_pretrained(tmp_path)
    with torch.no_grad():
        wanted = module(pixel_values=normal, output_hidden_states=True).hidden_states[-2]
    found = load_image_encoder(config)(images).cpu()
    assert found.shape == (2, config.tokens(), config.width()) == (2, 17, 12)
    assert found.numpy() == pytest.approx(wanted.numpy(), rel=3e-6, abs=3e-6)


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request, clips, tmp_path_factory):
    """A run of two steps, and the files of a first and a last frame."""
    folder = tmp_path_factory.mktemp("run")
    configs = begun_configs(folder, clips, request.param)
    configs.done(f"{STEPS} --save {folder}/out --sample-interval 2")
    for name, grey in (("first", 200), ("last", 40)):
        Image.new("L", (32, 32), grey).save(folder / f"{name}.png")
    Image.new("L", (16, 32)).save(folder / "narrow.png")
    images = ["--image", str(folder / "first.png")]
    if "last_frame" in NETWORKS[request.param]:
        images += ["--last-image", str(folder / "last.png")]
    return folder, images


def sample(folder, *flags):
    asked = ("--prompt", "a seven moves left", "--steps", "3", "--cfg-scale", "2", "--output", str(folder / "clip.npz"))
    return main(["sample", "--checkpoint", str(folder / "out"), *asked, *flags])


@pytest.mark.extended
def test_a_sample_begins_with_the_image_that_is_named(trained, capsys):
    folder, images = trained
    assert sample(folder, *images) == 0
    clip = np.load(folder / "clip.npz")["arr_0"]
    by_token = json.loads((folder / "model.json").read_text())["predictor"].get("expand_timesteps")
    if by_token:
        assert (np.abs(clip[0, 0].astype(int) - 200) <= 1).all() and (clip[0, 1] != 200).any()
    code = sample(folder)
    assert code == (0 if by_token else 2)
    if by_token:
        assert (np.load(folder / "clip.npz")["arr_0"][0, 0] != 200).any()
    else:
        assert "--image is needed, because the model begins a clip" in capsys.readouterr().err


@pytest.mark.extended
def test_pictures_of_a_run_begin_with_the_frames_of_its_clips_from_files_or_a_cache(clips, tmp_path):
    files = begun_configs(tmp_path / "files", clips, "features of CLIP, last frame", valid_fraction=0.2)
    drawn = []
    for configs in (files, in_cache(files, tmp_path / "cached", "features")):
        out = configs.folder / "out"
        outcome = configs.run(f"{STEPS} --save {out} --sample-interval 2 --report always --report-steps 20")
        assert outcome.code == 0 and "--image FIRST.png" in outcome.output, outcome.output
        pictures = (configs.folder / name for name in ("samples/iter_0000002.png", "samples.png"))
        drawn.append([np.asarray(Image.open(picture).convert("L")).astype(int) for picture in pictures])
    for grid, cached in zip(*drawn):
        assert np.abs(grid - cached).max() <= 1 and grid.std() > 5


def test_a_network_and_an_image_encoder_that_do_not_fit_are_named(clips, tmp_path):
    begun_configs(tmp_path, clips, "features of CLIP")
    model = json.loads((tmp_path / "model.json").read_text())
    for changes, named in (
        ({"image_encoder": None}, "image_encoder is missing"),
        ({"predictor": {"image_dim": None, "added_kv_proj_dim": None}}, "image_encoder is not used"),
        ({"predictor": {"image_dim": 13}}, "image_dim = 13"),
        ({"image_encoder": {"from_pretrained": "nowhere"}}, "image_encoder.from_pretrained = nowhere"),
    ):
        sections = {name: value and model[name] | value for name, value in changes.items()}
        (tmp_path / "model.json").write_text(json.dumps(model | sections))
        with pytest.raises(UserError, match=named):
            check_encoders(load_model_config(tmp_path / "model.json"))


@pytest.mark.extended
def test_an_image_that_does_not_fit_is_named_before_weights_are_read(trained, capsys):
    folder, images = trained
    assert sample(folder, "--image", str(folder / "narrow.png"), *images[2:]) == 2
    assert "--image has 32 x 16 pixels" in capsys.readouterr().err
