"""Texts of FLUX, Stable Diffusion 3, Qwen-Image and Z-Image, from captions to the network; data that fit a model."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="requirements/video.txt")
import re
from types import SimpleNamespace

import torch
import transformers
from safetensors.numpy import save_file

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.joint import Flux2Config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.configs.text_encoder import Mistral3Config, Qwen3Config, Qwen25VLConfig
from mindspeed_mm_dit.data.conditions import encode_conditions
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import load_encoders, load_text_encoder
from mindspeed_mm_dit.models.text_encoder import TEXT_KEPT
from mindspeed_mm_dit.objectives.registry import training_draw
from mindspeed_mm_dit.training.contract import EmaModel
from tests.captions_fixtures import captioned_configs
from tests.text_encoder_fixtures import CAPTIONS, write_clip, write_language_model, write_t5

pytest.importorskip("av", reason="requirements/video.txt")
from mindspeed_mm_dit.configs.condition import PooledText
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.models.data import _check_cached_text
from mindspeed_mm_dit.tools.evaluate import demo
from tests.clips_fixtures import clip_configs
from tests.conftest import GOLDEN, ROOT

WRITERS = {
    "t5": write_t5, "clip": partial(write_clip, projected=False), "clip_l": partial(write_clip, projected=True),
    "clip_g": partial(write_clip, projected=True), "qwen2_5_vl": partial(write_language_model, kind="qwen2_5_vl"),
    "qwen3": partial(write_language_model, kind="qwen3"), "mistral3": partial(write_language_model, kind="mistral3"),
}  # fmt: skip
ENCODERS = {
    "flux": ("t5", "clip"),
    "sd3": ("clip_l", "clip_g", "t5"),
    "qwen_image": ("qwen2_5_vl",),
    "z_image": ("qwen3",),
    "flux2": ("mistral3",),
}
SIZES = {"in_channels": 3, "latent_size": [8, 8], "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8}
OWN = {
    "flux": {"num_single_layers": 1, "axes_dims_rope": [2, 2, 4], "pooled_projection_dim": 16},
    "sd3": {"pooled_projection_dim": 24, "joint_attention_dim": 32, "encoder_dropout_prob": 0.4},
    "qwen_image": {"axes_dims_rope": [2, 2, 4]},
    "z_image": {"axes_dims_rope": [2, 2, 4], "num_refiner_layers": 1},
    "flux2": {"axes_dims_rope": [2, 2, 2, 2], "num_single_layers": 1, "joint_attention_dim": 32},
}


def configs_of(place, family, predictor=(), text=()):
    """Write images with captions, the encoders of ``family``, model.json and data.json; more settings of each."""
    files = captioned_configs(place)
    sections = []
    for name in ENCODERS[family]:
        WRITERS[name](place / name)
        kind = name.partition("_")[0] if name.startswith("clip") else name
        sections.append(
            {"model_id": kind, "from_pretrained": str(place / name), "dtype": "fp32", "max_length": 12}
            | ({"max_length": 40, "layers": [1, 2]} if family == "flux2" else {})
            | dict(text)
        )
    content = {
        "ae": {"model_id": "pixel", "channels": 3},
        "text_encoder": sections,
        "diffusion": {"model_id": "flow_matching", "data_time": int(family == "z_image")},
        "predictor": {"model_id": family, "joint_attention_dim": 16, **SIZES, **OWN[family], **dict(predictor)},
    }
    (place / "model.json").write_text(json.dumps(content))
    return files.folder / "model.json", files.folder / "data.json"


def losses(model_file, data_file, **param):
    """Return the batch and the losses of six samples, and the composite."""
    from mindspeed_mm_dit.framework import runtime
    from mindspeed_mm_dit.models.composite import DiTModel

    config = load_model_config(model_file)
    opened = open_data(config, dataclasses.replace(load_data_config(data_file, "--data").dataset_param, **param))
    model = DiTModel(config, *load_encoders(config))
    runtime.load_arrays(model.predictor, model.initial_weights(0))
    torch.manual_seed(0)
    for weight in model.predictor.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    batch = opened.samples(opened.rows, 0, True, training_draw(config.diffusion)).batch(np.arange(12))
    return batch, model(**runtime.to_device(batch)), model


@pytest.mark.parametrize(("kind", "config", "layer", "empty"), [
    ("qwen2_5_vl", Qwen25VLConfig, -1, " "), ("qwen3", Qwen3Config, -2, ""),
])  # fmt: skip
def test_a_language_model_answers_as_its_pipeline_asks_it(framework, tmp_path, kind, config, layer, empty):
    folder = write_language_model(tmp_path / kind, kind)
    own = config(str(folder), max_length=16, dtype="fp32").with_published_settings({})
    name = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}[kind]
    module = getattr(transformers, name).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokenizer([own.prompt_template.format(c or empty) for c in CAPTIONS], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = module(**asked, output_hidden_states=True).hidden_states[layer]
    found = load_text_encoder(own).encode(CAPTIONS)
    assert found.states.shape == (3, 16, 16) and own.states_width() == 16
    for row, mask, ours, kept in zip(states, asked.attention_mask, found.states, found.mask):
        expected = row[mask.bool()][own.cut_tokens :]
        torch.testing.assert_close(ours[: len(expected)], expected, atol=1e-5, rtol=1e-5)
        assert kept.sum() == len(expected) and not ours[len(expected) :].any()


@pytest.mark.parametrize("kind", ["mistral3", "qwen3"])
def test_flux2_gets_the_padding_s_states_too_and_a_chat_of_its_own(framework, tmp_path, kind):
    """As diffusers' Flux2Pipeline asks Mistral, and Flux2KleinPipeline asks Qwen3."""
    folder, layers = write_language_model(tmp_path / kind, kind), {"layers": (1, 2)}
    section = {"mistral3": Mistral3Config, "qwen3": Qwen3Config}[kind](str(folder), max_length=44, dtype="fp32")
    own = section.with_published_settings(Flux2Config.published_texts)
    assert own.layers == {"mistral3": (10, 20, 30), "qwen3": (9, 18, 27)}[kind]
    found = load_text_encoder(dataclasses.replace(own, **layers)).encode(CAPTIONS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if kind == "mistral3":
        system = own.prompt_template.partition("[/SYSTEM_PROMPT]")[0].removeprefix("[SYSTEM_PROMPT]")
        chats = [[("system", [{"text": system}]), ("user", [{"text": caption}])] for caption in CAPTIONS]
    else:
        chats = [[("user", caption)] for caption in CAPTIONS]
    written = [
        tokenizer.apply_chat_template([{"role": role, "content": content} for role, content in chat], tokenize=False,
                                      add_generation_prompt=True, enable_thinking=False)
        for chat in chats
    ]  # fmt: skip
    asked = tokenizer(written, padding="max_length", max_length=44, return_tensors="pt", add_special_tokens=False)
    name = {"mistral3": "Mistral3ForConditionalGeneration", "qwen3": "Qwen3ForCausalLM"}[kind]
    module = getattr(transformers, name).from_pretrained(folder).eval()
    with torch.no_grad():
        states = module(**asked, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(found.states, torch.cat([states[1], states[2]], 2), atol=1e-5, rtol=1e-5)
    assert torch.equal(found.mask, asked.attention_mask) and found.states[~found.mask.bool()].any()


def test_three_encoders_are_one_text_as_in_diffusers(framework, tmp_path):
    """Both CLIPs side by side, filled up with zeros, then T5, which reads its padding; pooled vectors side by side."""
    files = configs_of(tmp_path, "sd3")
    batch, _, model = losses(*files)
    batch = {name: torch.from_numpy(array) for name, array in batch.items() if name != TEXT_KEPT}
    pictures = EmaModel(None, None, model.predictor, model.text_encoders)  # draws while a run learns
    text, pooled = encode_conditions(model.predictor.config.conditions, batch, pictures)
    clips = [
        transformers.CLIPTextModelWithProjection.from_pretrained(tmp_path / name).eval()
        for name in ("clip_l", "clip_g")
    ]
    t5 = transformers.T5EncoderModel.from_pretrained(tmp_path / "t5").eval()
    with torch.no_grad():
        answers = [clip(batch[f"text_{n}_ids"], output_hidden_states=True) for n, clip in enumerate(clips)]
        last = t5(batch["text_2_ids"]).last_hidden_state
    states = torch.cat([answer.hidden_states[-2] for answer in answers], 2)
    expected = torch.cat([states, torch.nn.functional.pad(last, (0, 32 - 16))], 1)
    torch.testing.assert_close(text, expected)
    torch.testing.assert_close(pooled, torch.cat([answer.text_embeds for answer in answers], 1))


def test_each_of_three_encoders_is_lost_by_a_coin_of_its_own(framework, tmp_path):
    batch, _, model = losses(*configs_of(tmp_path, "sd3"))
    kept = batch[TEXT_KEPT]
    assert kept.shape == (12, 3) and 0 < kept.mean() < 1 and len(np.unique(kept, axis=0)) > 3
    text, pooled = model.loss_inputs({name: torch.from_numpy(array) for name, array in batch.items()})[:2]
    parts = (text[:, :12, :16], text[:, :12, 16:], text[:, 12:]), (pooled[:, :12], pooled[:, 12:])
    for number, part in enumerate(parts[0]):
        np.testing.assert_array_equal(part.flatten(1).any(1), kept[:, number] > 0)
    for number, part in enumerate(parts[1]):
        np.testing.assert_array_equal(part.any(1), kept[:, number] > 0)


def test_t5_reads_its_padding_where_the_network_was_published_so(tmp_path):
    model, _ = configs_of(tmp_path, "flux")
    assert load_model_config(model).text_encoders[0].attend_padding is True
    content = json.loads(model.read_text())
    content["text_encoder"][0]["attend_padding"] = False
    model.write_text(json.dumps(content))
    assert load_model_config(model).text_encoders[0].attend_padding is False


WRONG = {
    "width of T5": ("sd3", {"joint_attention_dim": 48}, {}, "joint_attention_dim = 48.* have width 32"),
    "pooled width": ("sd3", {"pooled_projection_dim": 16}, {}, "pooled_projection_dim = 16.* has width 24"),
    "no place": ("z_image", {}, {"prompt_template": "a caption"}, r"must contain \{\} once"),
    "width of Mistral": ("flux2", {"joint_attention_dim": 48}, {}, "joint_attention_dim = 48.* have width 32"),
    "cut of Mistral": ("flux2", {}, {"cut_tokens": 3}, "cut_tokens = 3 must be 0"),
    "layer": ("z_image", {}, {"layers": [7]}, r"text_encoder.layers = 7.*must be a number of at most 3"),
    "too long": ("z_image", {}, {"max_length": 9}, "has a caption of 10 tokens, and text_encoder.max_length is 9"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_text_encoder_that_does_not_fit_is_named_before_weights_are_read(tmp_path, case):
    family, predictor, text, words = WRONG[case]
    model, data = configs_of(tmp_path, family, predictor, text)
    for weights in tmp_path.glob("*/model.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match=words):
        open_data(load_model_config(model), load_data_config(data, "--data").dataset_param)


def test_the_strength_of_guidance_is_told_where_it_is_an_input(framework, tmp_path):
    """FLUX.1-dev is guided by its input alone, with Euler steps, unless one asks for more."""
    from mindspeed_mm_dit.sampling.generate import with_defaults
    from mindspeed_mm_dit.sampling.load import describe, load_model
    from mindspeed_mm_dit.sampling.request import ModelRequest, SampleRequest

    model, _ = configs_of(tmp_path, "flux", {"guidance_embeds": True})
    config = load_model_config(model)
    weights = initial_weights(parameters_of(config), 0)
    save_file(weights, tmp_path / "weights.safetensors")
    file = tmp_path / "weights.safetensors"
    requests = [ModelRequest(file, model=model, network_guidance=strength) for strength in (None, 2.0)]
    loaded = [load_model(describe(request)) for request in requests]
    assert [float(own.predictor.guidance) for own in loaded] == [3.5, 2.0]
    request = with_defaults(SampleRequest(), config)
    assert (request.sampler, request.steps, request.guidance) == ("euler", 28, 1.0)
    assert with_defaults(SampleRequest(guidance=2.0), config).guidance == 2.0


def test_a_strength_of_guidance_that_no_input_takes_is_refused(tmp_path, capsys):
    model, _ = configs_of(tmp_path, "flux")
    save_file(initial_weights(parameters_of(load_model_config(model)), 0), tmp_path / "weights.safetensors")
    files = f"--checkpoint {tmp_path}/weights.safetensors --model {model} --output {tmp_path}/a.png --prompt one "
    assert main(["sample", *files.split(), "--guidance", "3.5"]) == 2
    assert "--guidance = 3.5" in capsys.readouterr().err
    assert main(["sample", *files.split(), "--steps", "2"]) == 0


IMAGES = {"data_folder": "data", "image_size": 8}
DIT = json.loads((ROOT / "examples/dit/model.json").read_text()) | {"text_encoder": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setattr(demo, "NUM_CLIPS", 4)
    place = tmp_path_factory.mktemp("data") / "moving_digits"
    demo.write_moving_digits(place)
    patch.undo()
    return place


def open_all(folder, frames=9, size=32, max_length=8, text_dim=64, latent=(3, 4, 4)):
    predictor = {"model_id": "custom_dit", "num_layers": 1, "num_heads": 1, "head_dim": 8, "ffn_dim": 8,
                 "text_dim": text_dim, "latent_size": list(latent)}  # fmt: skip
    model = model_config_from_mapping(
        {
            "ae": {"model_id": "wan_video_vae", "from_pretrained": str(GOLDEN / "wan_vae_tiny")},
            "text_encoder": {"from_pretrained": str(folder / "text_encoder"), "max_length": max_length},
            "diffusion": {"model_id": "wan_flow_match_scheduler"},
            "predictor": predictor,
        },
        "model.json",
    )
    return open_data(model, ClipsParam(str(folder), str(folder / "annotation.json"), frames, size, size))


def test_clips_that_fit_are_opened_and_others_named(folder):
    data = open_all(folder)
    assert len(data.rows) == 4 and data.tokenizers[0].vocabulary_size == 19
    with pytest.raises(DataError) as raised:
        open_all(folder, frames=13, max_length=4, latent=(4, 4, 4))
    assert "4 of 4 clips" in str(raised.value) and "is short: it has 9 frames" in str(raised.value)
    with pytest.raises(DataError, match=r"line 2 has a caption of 5 tokens, and text_encoder\.max_length is 4"):
        open_all(folder, max_length=4)


def test_what_does_not_fit_is_named_before_a_clip_is_opened(folder, tmp_path):
    for place, settings, named in (
        (tmp_path / "empty", {"frames": 8}, "num_frames = 8"),
        (tmp_path / "empty", {"size": 40}, "max_width = 9, 40, 40.*makes latents of 3 x 5 x 5"),
        (tmp_path / "empty", {"size": 40, "latent": (3, 5, 5)}, "latent_size"),  # which the patch does not divide
        (folder, {"text_dim": 32}, r"predictor\.text_dim = 32"),
    ):
        with pytest.raises(ConfigError, match=named):
            open_all(place, **settings)


def test_texts_that_a_cache_does_not_keep_are_named():
    def check(name, width):
        cache = SimpleNamespace(index=SimpleNamespace(texts={name: None}), widths=lambda name: {width})
        _check_cached_text("latents = cache", cache, PooledText(6))

    check("pooled", 6)
    with pytest.raises(ConfigError, match=r"latents = cache.*contains no pooled"):
        check("text", 6)
    with pytest.raises(ConfigError, match=r"latents = cache.*contains pooled of width 5"):
        check("pooled", 5)


def test_files_that_do_not_go_together_are_named(folder, tmp_path):
    for sections, param, message in (
        ({"ae": {"model_id": "autoencoder_kl", "from_pretrained": "x"}}, {}, "does not encode videos, which"),
        ({"predictor": {"patch_size": [2, 8, 8], "latent_size": [8, 32, 32]}}, {}, "makes latents of 9 x 32 x 32"),
        ({}, {"json_path": "nowhere.json"}, "dataset_param.json_path = nowhere.json"),
        ({}, {"dataset_type": "films"}, "dataset_param.dataset_type = 'films'"),
        ({}, {"features": "nowhere"}, "features = nowhere holds no finished cache"),
        ({}, IMAGES, "'image_folder' has samples that are images, but predictor 'custom_dit'"),
        (DIT, {}, "'clips' has samples that are videos, but predictor 'dit'"),
    ):
        configs = clip_configs(tmp_path, folder).change("model.json", **sections)
        if param is IMAGES:
            (tmp_path / "data.json").write_text(json.dumps({"dataset_param": IMAGES}))
        configs.change("data.json", dataset_param=param)
        with pytest.raises(UserError, match=re.escape(message)):
            model = load_model_config(tmp_path / "model.json")
            open_data(model, load_data_config(tmp_path / "data.json").dataset_param)
