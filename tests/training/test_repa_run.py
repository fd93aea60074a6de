"""REPA as a run and its user meet it: two teachers beside the digits, what they say, and what does not fit."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="requirements/video.txt")

import transformers

from mindspeed_mm_dit.checkpoint.formats import FORMATS, read_weights
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.registry import load_teachers
from tests.training.launch import Configs
from tests.training.test_flow_run import flow_configs, sample

pytestmark = pytest.mark.ranks

STEPS = "--train-iters 4 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
LEARNED = {"patch_size": 2, "z_dims": [16, 24], "projector_dim": 12, "encoder_depth": 1, "learn_sigma": False}


def write_teachers(folder) -> list[dict]:
    """Few random weights: a DINOv2 of patches of 2 pixels, trained at 14, and a whole SigLIP of patches of 4."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2}
    dinov2 = transformers.Dinov2Config(hidden_size=16, image_size=14, patch_size=2, **sizes)
    transformers.Dinov2Model(dinov2).save_pretrained(folder / "dinov2")
    vision = {"hidden_size": 24, "intermediate_size": 32, "image_size": 8, "patch_size": 4, **sizes}
    text = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 16, **sizes}
    siglip = transformers.SiglipConfig(vision_config=vision, text_config=text)
    transformers.SiglipModel(siglip).save_pretrained(folder / "siglip")
    return [{"model_id": "dinov2", "from_pretrained": str(folder / "dinov2")},
            {"model_id": "siglip", "from_pretrained": str(folder / "siglip"), "weight": 0.25}]  # fmt: skip


def repa_configs(folder, digits) -> Configs:
    configs = flow_configs(folder, digits, data_time=0)
    configs.change("data.json", dataset_param={"random_flip": True})
    return configs.change("model.json", teacher=write_teachers(folder), predictor=LEARNED)


@pytest.fixture(scope="module")
def repa(tmp_path_factory, few_digits) -> Configs:
    return repa_configs(tmp_path_factory.mktemp("repa"), few_digits)


@pytest.fixture(scope="module")
def trained(repa):
    repa.done(STEPS + f"--save {repa.folder}/checkpoints")
    return repa.folder / "checkpoints"


def test_projectors_are_trained_and_saved_and_stay_behind_in_exports(trained, tmp_path):
    found = FORMATS["pytorch"].read(trained / "iter_0000004").weights
    projectors = {name: array for name, array in found.items() if name.startswith("projectors.")}
    assert len(projectors) == 12 and all(array.any() for name, array in projectors.items() if "bias" in name)
    assert main(["convert", str(trained), str(tmp_path / "export.safetensors"), "--weights", "ema"]) == 0
    assert read_weights(tmp_path / "export.safetensors").keys() == found.keys() - projectors.keys()
    images = []
    for checkpoint in (trained, tmp_path / "export.safetensors"):
        assert sample(checkpoint, tmp_path / "x.npz", "--steps", "2") == 0
        images.append(np.load(tmp_path / "x.npz")["arr_0"])
    np.testing.assert_array_equal(*images)


def test_features_are_those_that_transformers_gives_of_the_image_at_the_size_of_the_tokens(repa):
    """16 tokens: DINOv2 of patches of 2 sees 8 x 8 pixels, SigLIP of patches of 4 sees 16 x 16."""
    teachers = load_teachers(load_model_config(repa.folder / "model.json"))
    images = torch.rand(3, 1, 8, 8) * 2 - 1
    dinov2 = transformers.Dinov2Model.from_pretrained(repa.folder / "dinov2").eval()
    siglip = transformers.SiglipVisionModel.from_pretrained(repa.folder / "siglip").eval()
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    larger = torch.nn.functional.interpolate(images.expand(3, 3, 8, 8), (16, 16), mode="bicubic")
    with torch.no_grad():
        first = dinov2(((images + 1) / 2 - mean) / std).last_hidden_state[:, 1:]
        second = siglip(larger, interpolate_pos_encoding=True).last_hidden_state
    for teacher, expected in zip(teachers, (first, second), strict=True):
        torch.testing.assert_close(teacher(runtime.to_runtime_device(images)).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_named_before_a_step(repa, tmp_path):
    for sections, message in (
        ({"predictor": {"z_dims": [16]}}, "needs 1 teachers"),
        ({"predictor": {"z_dims": [16, 20]}}, "z_dims[1] = 20"),
        ({"teacher": [{"model_id": "dino"}] * 2}, "teacher[0].model_id = 'dino'"),
        ({"diffusion": {"model_id": "mean_flow"}, "predictor": {"h_embedder": True}}, "not for mean_flow"),
    ):
        outcome = repa.copy(tmp_path).change("model.json", **sections).run(STEPS)
        assert outcome.code == 2 and message in outcome.output and "Traceback" not in outcome.output, outcome.output


def test_a_cache_of_another_teacher_is_refused(repa, tmp_path):
    cache = ("--output", str(tmp_path / "cache"), "--shard-images", "500")
    files = ("--model", str(repa.folder / "model.json"), "--data", str(repa.folder / "data.json"))
    assert main(["cache-latents", *files, *cache]) == 0
    configs = repa.copy(tmp_path).change("data.json", dataset_param={"latents": str(tmp_path / "cache")})
    first, second = json.loads((tmp_path / "model.json").read_text())["teacher"]
    outcome = configs.change("model.json", teacher=[first, {**second, "dtype": "bf16"}]).run(STEPS)
    assert outcome.code == 2 and "was made with another teacher" in outcome.output, outcome.output
