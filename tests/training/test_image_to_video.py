"""Clips that begin with an image: training on a clip's own frames, and samples from an image that a user names."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import ConfigError
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import FRAMEWORK, GOLDEN
from tests.training.launch import Configs

pytestmark = pytest.mark.skipif(FRAMEWORK != "pytorch", reason="the text encoder runs on PyTorch")
STEPS = "--train-iters 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant "
VAE = {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")}
CLIP = {"image_dim": 12, "added_kv_proj_dim": 16}
NETWORKS = {
    "channels": {"in_channels": 6},
    "channels, last frame": {"in_channels": 6, "last_frame": True},
    "times by token": {"expand_timesteps": True},
    "features of CLIP": {"in_channels": 6, **CLIP},
    "features of CLIP, last frame": {
        "in_channels": 36, "out_channels": 16, **CLIP, "pos_embed_seq_len": 34, "last_frame": True,
        "latent_size": [3, 4, 4], "patch_size": [1, 2, 2],
    },
}  # fmt: skip
BESIDE = ("channels, last frame", "times by token", "features of CLIP, last frame")
"""Networks that are trained on images beside the clips; the others on the clips' own frames."""


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Clips, each with the images it begins and ends with: mirrored frames of its own size."""
    pytest.importorskip("av", reason="requirements/video.txt")
    pytest.importorskip("transformers", reason="requirements/video.txt")
    folder = write_clips(tmp_path_factory.mktemp("clips"))
    entries = json.loads((folder / "annotation.json").read_text())
    for number, entry in enumerate(entries):
        for name, place in (("first", 0), ("last", -1)):
            frame = read_frames(folder / entry["path"], np.array([place % entry["num_frames"]]))[0]
            entry[name] = f"{name}{number}.png"
            Image.fromarray(frame[:, ::-1].copy()).save(folder / entry[name])
    (folder / "annotation.json").write_text(json.dumps(entries))
    return folder


def write_clip_vision(folder, image_size):
    """Few random weights of CLIP's vision half, with patches of 2 pixels."""
    transformers = pytest.importorskip("transformers", reason="requirements/video.txt")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.CLIPVisionConfig(hidden_size=12, image_size=image_size, patch_size=2, **sizes)
    transformers.CLIPVisionModel(config).save_pretrained(folder)
    return {"from_pretrained": str(folder)}


def test_features_are_the_states_before_clips_last_layer_of_a_square_of_its_size(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from mindspeed_mm_dit.configs.image_encoder import ImageEncoderConfig
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
    assert found.numpy() == pytest.approx(wanted.numpy(), abs=1e-6)


def begun_configs(folder, clips, name, **data):
    """Write the configs of a network that begins with an image."""
    changes = NETWORKS[name]
    data |= {"first_frame_key": "first", "last_frame_key": "last"} if name in BESIDE else {}
    configs = clip_configs(folder, clips, "wan", **data)
    model = json.loads((folder / "model.json").read_text())
    model["predictor"] |= {"patch_size": [1, 8, 8], **changes}
    if "image_dim" in changes:
        model["image_encoder"] = write_clip_vision(folder / "image_encoder", 8 if "last_frame" in changes else 32)
    if changes.get("out_channels") == 16:
        model["ae"] = VAE
    (folder / "model.json").write_text(json.dumps(model))
    return configs


@pytest.fixture(scope="module", params=NETWORKS)
def trained(request, clips, tmp_path_factory):
    """A run of two steps, and the files of a first and a last frame."""
    folder = tmp_path_factory.mktemp("run")
    configs = begun_configs(folder, clips, request.param)
    outcome = configs.run(f"{STEPS} --save {folder}/out")
    assert outcome.code == 0, outcome.output
    (folder / "losses.json").write_text(json.dumps(outcome.losses))
    for name, grey in (("first", 200), ("last", 40)):
        Image.new("L", (32, 32), grey).save(folder / f"{name}.png")
    Image.new("L", (16, 32)).save(folder / "narrow.png")
    images = ["--image", str(folder / "first.png")]
    if "last_frame" in NETWORKS[request.param]:
        images += ["--last-image", str(folder / "last.png")]
    return folder, images


@pytest.fixture(scope="module")
def features(trained, clips, tmp_path_factory):
    """The same configs with a cache, and without clips and encoders."""
    folder, place = trained[0], tmp_path_factory.mktemp("features")
    files = ("--model", str(folder / "model.json"), "--data", str(folder / "data.json"))
    assert main(["cache-latents", *files, "--output", str(place / "cache"), "--shard-images", "10"]) == 0
    data = json.loads((folder / "data.json").read_text())
    data["dataset_param"] |= {"features": str(place / "cache"), "data_folder": "no", "json_path": "no/annotation.json"}
    (place / "data.json").write_text(json.dumps(data))
    (place / "model.json").write_text((folder / "model.json").read_text())
    wrapped = "sub_modules_to_wrap: ['predictor.blocks.{*}']\nsharding_size: auto\n"
    (place / "auto.yaml").write_text(wrapped)
    return Configs(place)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cache_teaches_what_the_files_do_on_any_ranks(trained, features, ranks):
    sharded = f"--use-torch-fsdp2 --fsdp2-config-path {features.folder}/auto.yaml --micro-batch-size 1"
    outcome = features.run(STEPS + (sharded if ranks > 1 else ""), ranks)
    wanted = json.loads((trained[0] / "losses.json").read_text())
    assert outcome.code == 0, outcome.output
    assert [*outcome.losses.values()] == pytest.approx([*wanted.values()], rel=2e-6)


def sample(folder, *flags):
    asked = ("--prompt", "a seven moves left", "--steps", "3", "--cfg-scale", "2", "--output", str(folder / "clip.npz"))
    return main(["sample", "--checkpoint", str(folder / "out"), *asked, *flags])


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
        assert "--image: is needed: the model begins a clip with an image" in capsys.readouterr().err


def test_pictures_during_training_need_no_image_or_are_refused(trained):
    from mindspeed_mm_dit.configs.model import load_model_config

    conditions = load_model_config(trained[0] / "model.json").predictor.conditions
    if conditions.frames.mask_channels == 1:
        conditions.check_draws_alone("--report")
    else:
        with pytest.raises(ConfigError, match="--report: draws samples without an image"):
            conditions.check_draws_alone("--report")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_encoder": None},
            "image_encoder: this section is missing: predictor.image_dim asks for CLIP's features",
        ),
        ({"predictor": {"image_dim": None, "added_kv_proj_dim": None}}, "image_encoder: predictor.image_dim is null"),
        ({"predictor": {"image_dim": 13}}, "image_dim = 13: takes 257 features of that width, and .* 257 of width 12"),
        ({"image_encoder": {"from_pretrained": "nowhere"}}, "image_encoder.from_pretrained = nowhere"),
    ],
)
def test_a_network_and_an_image_encoder_that_do_not_belong_together_are_named(clips, tmp_path, changes, message):
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.models.registry import check_encoders

    begun_configs(tmp_path, clips, "features of CLIP")
    model = json.loads((tmp_path / "model.json").read_text())
    for name, value in changes.items():
        model[name] = value and model[name] | value
    (tmp_path / "model.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=message):
        check_encoders(load_model_config(tmp_path / "model.json"))


def test_an_image_that_does_not_fit_is_named_before_weights_are_read(trained, capsys):
    folder, images = trained
    for wrong, words in (
        ("narrow.png", "--image: is of 32 x 16 pixels, and the clip of 32 x 32"),
        ("none.png", "none.png"),
    ):
        assert sample(folder, "--image", str(folder / wrong), *images[2:]) == 2
        assert words in capsys.readouterr().err
