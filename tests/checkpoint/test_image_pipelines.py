"""Whole pipelines of image transformers, and adapters: diffusers draws from our files what we draw."""

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.lora import ADAPTER_FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.data.order import Stream, normals
from mindspeed_mm_dit.integrations.formats import diffusers_folder as folder_of_diffusers
from mindspeed_mm_dit.integrations.formats.pipelines import _sampling_times
from mindspeed_mm_dit.integrations.formats.single_files import SAFETENSORS
from mindspeed_mm_dit.models.joint import pack
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.objectives.flow.timesteps import sampling_times
from tests.autoencoder_kl_fixtures import FLUX, our_shapes, write_flux2, write_folder
from tests.checkpoint.test_lora_files import TARGETS, drawn
from tests.checkpoint.test_pipeline import drawn as pictures_of
from tests.checkpoint_fixtures import assert_same
from tests.text_encoder_fixtures import write_clip, write_language_model, write_t5

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers", reason="requirements/video.txt")
pytestmark = pytest.mark.filterwarnings("ignore")  # (diffusers' and peft's own)

TEXT, LENGTH, STEPS, SIZE = "a seven moves left", 12, 3, (32, 48)
HEADS = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 16}
TURNED, ONE = {"axes_dims_rope": [4, 6, 6]}, {"num_single_layers": 1}
FLUX2 = {"latent_size": [8, 12], "axes_dims_rope": [4, 4, 4, 4], "joint_attention_dim": 32, **ONE}
FAMILIES = {
    "FluxPipeline": ("flux", {**TURNED, **ONE, "pooled_projection_dim": 16, "guidance_embeds": True},
                     {"sample_schedule": "flux"}, {"guidance_scale": 3.5}, {}),
    "FluxPipeline, schnell": ("flux", {**TURNED, **ONE, "pooled_projection_dim": 16}, {"sample_shift": 1.0}, {}, {}),
    "StableDiffusion3Pipeline": (
        "sd3", {"pooled_projection_dim": 24, "joint_attention_dim": 32, "pos_embed_max_size": 16, "qk_norm": "rms_norm",
                "dual_attention_layers": [0]},
        {"sample_schedule": "sd3", "shift": 3.0}, {"guidance_scale": 4.5}, {"guidance": 4.5}),
    "QwenImagePipeline": (
        "qwen_image", {**TURNED, "latent_size": [4, 6]}, {"sample_schedule": "qwen_image"},
        {"true_cfg_scale": 4.0, "negative_prompt": " "}, {"guidance": 4.0, "rescale": "token"}),
    "ZImagePipeline": ("z_image", {**TURNED, "num_refiner_layers": 1}, {"shift": 3.0},
                       {"guidance_scale": 3.0}, {"guidance": 4.0}),
    "Flux2Pipeline": ("flux2", FLUX2 | {"guidance_embeds": True}, {"sample_schedule": "flux2"},
                      {"guidance_scale": 3.5, "text_encoder_out_layers": (1, 2)}, {}),
    "Flux2KleinPipeline": ("flux2", FLUX2 | {"guidance_embeds": False}, {"sample_schedule": "flux2"},
                           {"guidance_scale": 4.0, "text_encoder_out_layers": (1, 2)}, {"guidance": 4.0}),
}  # fmt: skip
"""Class in diffusers -> predictor, its settings, those of the objective, arguments of a call there, and here."""
CLIP = partial(write_clip, projected=True)
LANGUAGE_MODELS = {"QwenImagePipeline": "qwen2_5_vl", "ZImagePipeline": "qwen3", "Flux2Pipeline": "mistral3",
                   "Flux2KleinPipeline": "qwen3"}  # fmt: skip
ENCODERS = {
    "FluxPipeline": (("t5", write_t5), ("clip", partial(write_clip, projected=False))),
    "StableDiffusion3Pipeline": (("clip", CLIP), ("clip", CLIP), ("t5", partial(write_t5, width=32))),
    **{name: ((kind, partial(write_language_model, kind=kind)),) for name, kind in LANGUAGE_MODELS.items()},
}
LENGTHS = {"mistral3": 48, "qwen2_5_vl": 16, "qwen3": 20}
"""Tokens of a caption in its prompt; of T5 and CLIP LENGTH."""


def model_of(place, name):
    """A model.json with small encoders and an autoencoder, of the kinds that the pipeline has."""
    predictor, sizes, flow, _, _ = FAMILIES[name]
    sections = []
    for number, (model_id, write) in enumerate(ENCODERS[name.partition(",")[0]]):
        folder = write(place / f"encoder{number}")
        section = {"model_id": model_id, "from_pretrained": str(folder), "max_length": LENGTHS.get(model_id, LENGTH)}
        sections.append({**section, "dtype": "fp32", **({"layers": [1, 2]} if predictor == "flux2" else {})})
        settings = json.loads((folder / "tokenizer_config.json").read_text())  # (pipelines ask CLIP's for its length)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": LENGTH}))
    channels = 16 if predictor == "flux2" else 4
    return {
        "ae": {"model_id": write_autoencoder(place / "vae", predictor), "from_pretrained": str(place / "vae")},
        "text_encoder": sections,
        "diffusion": {"model_id": "flow_matching", "data_time": int(predictor == "z_image"), **flow},
        "predictor": {"model_id": predictor, **HEADS, "in_channels": channels, "latent_size": [16, 24], **sizes},
    }


def write_autoencoder(folder, predictor):
    if predictor == "qwen_image":
        statistics = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 0.7]}
        diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=4, **statistics).save_pretrained(folder)
        return "qwen_image_vae"
    if predictor == "flux2":
        write_flux2(folder)
        return "flux2_vae"
    shifted = FLUX | {"latent_channels": 4}
    write_folder(folder, shifted, our_shapes(shifted))
    return "autoencoder_kl"


def filled(config):
    draw, shapes = np.random.default_rng(0), parameters_of(config.predictor).shapes()
    return {name: 0.2 * draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def our_picture(place, asked, *adapters):
    """Pixels (H, W, 3) from 0 to 1."""
    asked = {"steps": STEPS, "seed": 3, "guidance": 1.0, **asked}
    return pictures_of(place / "a.safetensors", {"caption": [TEXT]}, adapters, **asked)[0] / 255


def their_picture(pipeline, config, asked, predictor):
    noise = torch.from_numpy(normals(3, Stream.SAMPLE_START, np.array([0]), config.latent_shape))
    latents = pack(noise) if predictor in ("flux", "qwen_image") else noise
    length = {} if predictor == "qwen_image" else {"max_sequence_length": config.text_encoders[-1].max_length}
    size = dict(zip(("height", "width"), SIZE))
    given = {"prompt": TEXT, "latents": latents, "num_inference_steps": STEPS, "output_type": "np"}
    return pipeline(**given, **size, **length, **asked).images[0]


VARIANTS = ("FluxPipeline, schnell", "Flux2KleinPipeline")
NAMES = [pytest.param(name, marks=[pytest.mark.extended] * (name in VARIANTS)) for name in FAMILIES]


@pytest.mark.parametrize("name", NAMES)
def test_diffusers_draws_our_picture_from_pipeline_and_adapters(framework, name, tmp_path):
    predictor, _, _, theirs, ours = FAMILIES[name]
    kind = getattr(diffusers, name.partition(",")[0], None)
    if kind is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    model = model_of(tmp_path, name)
    config = model_config_from_mapping(model, "model.json")
    shapes, weights = parameters_of(config.predictor).shapes(), filled(config)
    SAFETENSORS.write(tmp_path / "a.safetensors", State({"model": weights}, {"model": model}))
    assert main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "pipeline"), "--to", "pipeline"]) == 0
    assert_same(folder_of_diffusers.read_arrays(tmp_path / "pipeline/transformer"), weights)
    pipeline = kind.from_pretrained(tmp_path / "pipeline")
    pipeline.set_progress_bar_config(disable=True)
    picture = their_picture(pipeline, config, theirs, predictor)
    assert picture.shape == (*SIZE, 3) and picture.std() > 0.03
    found = our_picture(tmp_path, ours)
    np.testing.assert_allclose(found, picture, atol=1.01 / 255)
    (tmp_path / "lora").mkdir()
    ADAPTER_FORMATS["diffusers"].write(tmp_path / "lora", drawn(config.predictor, TARGETS[predictor]), shapes)
    pipeline.load_lora_weights(tmp_path / "lora")
    adapted = our_picture(tmp_path, ours, str(tmp_path / "lora"))
    assert np.abs(adapted - found).max() > 0.1
    np.testing.assert_allclose(adapted, their_picture(pipeline, config, theirs, predictor), atol=1.01 / 255)


@pytest.mark.parametrize(("change", "words"), [
    ({"diffusion": {"path": "gvp"}}, "diffusion has path gvp"),
    ({"diffusion": {"shift_base": 4096}}, "diffusion.shift_base = 4096"),
    ({"ae": {"model_id": "pixel", "channels": 3}}, "ae.model_id = 'pixel'"),
    ({"text_encoder": {"model_id": "words"}}, "text encoders of model.json are words"),
])  # fmt: skip
def test_model_that_the_pipeline_samples_otherwise_is_refused(change, words, tmp_path, capsys):
    parts = {
        "ae": {"model_id": "autoencoder_kl", "from_pretrained": "vae", "latent_channels": 3},
        "text_encoder": {"model_id": "qwen3", "from_pretrained": "text"},
        "diffusion": {"model_id": "flow_matching", "data_time": 1, **change.pop("diffusion", {})},
        "predictor": {"model_id": "z_image", **HEADS, **TURNED, "num_refiner_layers": 1, "in_channels": 3},
    }
    (tmp_path / "model.json").write_text(json.dumps(parts | change))
    config = model_config_from_mapping(parts, "model.json")
    SAFETENSORS.write(tmp_path / "a.safetensors", State({"model": filled(config)}, {}))
    given = ["--to", "pipeline", "--model", str(tmp_path / "model.json")]
    assert main(["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "other"), *given]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flux", "qwen_image"])
def test_times_shifted_by_tokens_are_those_of_the_pipeline(name):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    flow = FlowMatchingConfig(dynamic_shift=name, data_time=0)
    told = _sampling_times(SimpleNamespace(diffusion=flow, latent_shape=(16, 64, 64)))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**told)
    ends = (told[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
    line = dict(zip(("base_seq_len", "max_seq_len", "base_shift", "max_shift"), ends))
    for side in (128, 32):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 4, 4), mu=calculate_shift(side * side // 4, **line))
        np.testing.assert_allclose(scheduler.sigmas.numpy(), 1 - sampling_times(flow, 4, (16, side, side)), atol=1e-6)
