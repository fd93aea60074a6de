"""mm-dit sample with two experts, one for high noise and one for low."""

import json
from pathlib import Path

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.checkpoint.lora import ADAPTER_FORMATS, Adapter, LowRank
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.integrations.formats.families import WAN_BLOCK
from mindspeed_mm_dit.integrations.formats.single_files import SAFETENSORS, read_safetensors
from mindspeed_mm_dit.models.meta import parameters_of
from tests.clips_fixtures import clip_configs, write_clips
from tests.conftest import GOLDEN

pytestmark = pytest.mark.pytorch  # for the text encoder
HIGH, LOW = [0.6, 1.0], [0.0, 0.6]


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    place = tmp_path_factory.mktemp("clips")
    clip_configs(place / "config", write_clips(place), "wan")
    return place, json.loads((place / "config/model.json").read_text())


def expert(clips, name, window, **predictor):
    """A file of random weights that remembers its model.json."""
    place, model = clips
    diffusion = {**model["diffusion"], "timestep_window": window}
    model = {**model, "diffusion": diffusion, "predictor": {**model["predictor"], **predictor}}
    shapes = parameters_of(model_config_from_mapping(model, name).predictor).shapes()
    draw = np.random.default_rng(len(name))
    weights = {n: draw.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes.items()}
    SAFETENSORS.write(place / f"{name}.safetensors", State({"model": weights}, {"model": model}))
    return str(place / f"{name}.safetensors")


def sampled(tmp_path, *flags):
    output = tmp_path / "clips.npz"
    asked = ("--prompt", "a seven moves left", "--num-per-prompt", "2", "--steps", "5", "--sampler", "unipc")
    assert main(["sample", *flags, *asked, "--output", str(output)]) == 0
    return np.load(output)["arr_0"]


def test_each_expert_answers_in_its_own_window(clips, tmp_path):
    high, low = expert(clips, "high", HIGH), expert(clips, "low", LOW)
    both = ("--checkpoint", high, "--low-noise-checkpoint", low)
    found = sampled(tmp_path, *both)
    alone = [sampled(tmp_path, "--checkpoint", one) for one in (high, low)]
    assert all((found != one).mean() > 0.1 for one in alone)
    assert (sampled(tmp_path, *both, "--batch-size", "1") == found).mean() > 0.999
    assert (sampled(tmp_path, *both, "--boundary", "0") == alone[0]).all()
    assert (sampled(tmp_path, *both, "--boundary", "1") == alone[1]).all()
    guided = sampled(tmp_path, *both, "--boundary", "1", "--low-noise-cfg-scale", "1")
    assert (guided == sampled(tmp_path, "--checkpoint", low, "--cfg-scale", "1")).all()


@pytest.mark.parametrize(
    "form", ["diffusers", *(pytest.param(form, marks=pytest.mark.extended) for form in ("kohya", "native"))]
)
def test_each_expert_has_its_own_adapters(clips, tmp_path, form):
    """One file for each, and nothing in it tells which: the flag decides, as where diffusers loads it."""
    high, low = expert(clips, "high", HIGH), expert(clips, "low", LOW)
    draw, files = np.random.default_rng(0), []
    shapes = {name: array.shape for name, array in read_safetensors(Path(low)).weights.items()}
    layers = [f"blocks.{i}.{layer}" for i in range(2) for layer in WAN_BLOCK]
    for name in ("of_high", "of_low"):
        sides = ((shapes[f"{layer}.weight"], layer) for layer in layers)
        adapter = Adapter({layer: LowRank(*(draw.normal(0, 0.3, side).astype(np.float32) for side in ((2, columns), (
            rows, 2))), 2.0) for (rows, columns), layer in sides})  # fmt: skip
        files.append(tmp_path / (name if ADAPTER_FORMATS[form].is_folder else f"{name}.safetensors"))
        if ADAPTER_FORMATS[form].is_folder:
            files[-1].mkdir()
        ADAPTER_FORMATS[form].write(files[-1], adapter, shapes)
    merged = [str(tmp_path / f"{name}.safetensors") for name in ("merged_high", "merged_low")]
    for checkpoint, file, target in zip((high, low), files, merged):
        assert main(["convert", checkpoint, target, "--merge-lora", str(file)]) == 0
    lora = ("--lora", str(files[0]), "--low-noise-lora", str(files[1]))
    found = sampled(tmp_path, "--checkpoint", high, "--low-noise-checkpoint", low, *lora)
    places = ("--model", str(clips[0] / "config/model.json"), "--boundary", "0.6")  # (a converted file names none)
    wanted = sampled(tmp_path, "--checkpoint", merged[0], "--low-noise-checkpoint", merged[1], *places)
    assert (found == wanted).mean() > 0.999
    swapped = ("--lora", str(files[1]), "--low-noise-lora", str(files[0]))
    assert (sampled(tmp_path, "--checkpoint", high, "--low-noise-checkpoint", low, *swapped) != wanted).mean() > 0.1


@pytest.mark.parametrize(("first", "second", "flags", "words"), [
    (LOW, HIGH, "", "the high-noise expert"),
    (HIGH, HIGH, "", "0.6 to 1"),
    (HIGH, [0.0, 0.5], "", "--boundary"),
    ([0.0, 1.0], [0.0, 1.0], "", "--boundary"),
    (HIGH, LOW, "--boundary 2", "--boundary = 2.0"),
    (HIGH, LOW, "--low-noise-cfg-scale -1", "--low-noise-cfg-scale = -1"),
    (HIGH, None, "--boundary 0.5", "--boundary = 0.5"),
    (HIGH, LOW, "ffn_dim", "predictor.ffn_dim = 25, and --checkpoint has 24"),
])  # fmt: skip
def test_experts_that_do_not_belong_together_are_refused(clips, capsys, first, second, flags, words):
    flags, other = ("", {"ffn_dim": 25}) if flags == "ffn_dim" else (flags, {})
    given = ["--checkpoint", expert(clips, "a", first), "--prompt", "a", "--output", "unused.npz", *flags.split()]
    given += ["--low-noise-checkpoint", expert(clips, "b", second, **other)] if second else []
    assert main(["sample", *given]) == 2 and words in capsys.readouterr().err


def test_folder_of_diffusers_is_both_experts(clips, tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="requirements/video.txt")
    place, model = clips
    text, vae = Path(model["text_encoder"]["from_pretrained"]), GOLDEN / "wan_vae_tiny"
    wide = {**model, "ae": {"model_id": "wan_video_vae", "from_pretrained": str(vae)}}
    wide["text_encoder"] = {"from_pretrained": str(text), "zero_padding": True}
    wide["diffusion"] = {**model["diffusion"], "shift": 5.0, "sigma_min": 0.0, "extra_one_step": True}
    latents = {"in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "latent_size": [3, 4, 4]}
    high, low = (expert((place, wide), name, window, **latents) for name, window in (("high", HIGH), ("low", LOW)))
    folder = tmp_path / "both"
    assert main(["convert", high, str(folder), "--low-noise-checkpoint", low]) == 0
    for name, target in (("vae", vae), ("text_encoder", text), ("tokenizer", text.parent / "tokenizer")):
        (folder / name).symlink_to(target)
    (folder / "scheduler").mkdir()
    (folder / "scheduler/scheduler_config.json").write_text(json.dumps({"flow_shift": 5.0}))
    size = ("--frames", "9", "--size", "32x32", "--low-noise-cfg-scale", "2")
    wanted = sampled(tmp_path, "--checkpoint", high, "--low-noise-checkpoint", low, *size)
    assert np.array_equal(sampled(tmp_path, "--checkpoint", str(folder), *size), wanted)
    pipe = dit.load(folder)
    asked = {"prompts": "a seven moves left", "num": 2, "steps": 5, "sampler": "unipc", "frames": 9, "size": (32, 32)}
    assert np.array_equal(pipe.sample(low_noise_guidance=2.0, **asked).arrays, wanted)
    with pytest.raises(ConfigError, match="single expert"):
        pipe.loss(wanted, prompts="a seven moves left")
    theirs = diffusers.WanTransformer3DModel.from_pretrained(folder, subfolder="transformer_2").state_dict()
    ours = read_safetensors(Path(low)).weights
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name].numpy()) for name in ours)
    assert json.loads((folder / "model_index.json").read_text())["boundary_ratio"] == 0.6
