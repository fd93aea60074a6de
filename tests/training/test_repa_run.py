"""REPA as a run and its user meet it: two teachers beside the digits, caches, ranks, resume, and what does not fit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="requirements/video.txt")

import transformers

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.registry import load_teachers
from tests.mindspore import launch as mindspore
from tests.training.launch import Configs
from tests.training.test_flow_run import flow_configs, sample

pytestmark = pytest.mark.ranks

TOLERANCE = 2e-6
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


def change(configs, **sections) -> None:
    """Replace sections of model.json, or with a dict parts of them."""
    path = configs.folder / "model.json"
    model = json.loads(path.read_text())
    for name, value in sections.items():
        model[name] = model[name] | value if isinstance(value, dict) and name in model else value
    path.write_text(json.dumps(model))


@pytest.fixture(scope="module")
def repa(tmp_path_factory, few_digits) -> Configs:
    configs = flow_configs(tmp_path_factory.mktemp("repa"), few_digits, data_time=0)
    data = json.loads((configs.folder / "data.json").read_text())
    data["dataset_param"]["random_flip"] = True
    (configs.folder / "data.json").write_text(json.dumps(data))
    wrapped = "sub_modules_to_wrap: ['predictor.blocks.{*}']\nsharding_size: auto\n"
    (configs.folder / "auto.yaml").write_text(wrapped)
    change(configs, teacher=write_teachers(configs.folder), predictor=LEARNED)
    return configs


@pytest.fixture(scope="module")
def whole(repa):
    """One process, the teachers asked as it goes."""
    outcome = repa.run(STEPS + f"--micro-batch-size 8 --save {repa.folder}/checkpoints")
    assert outcome.code == 0 and len(outcome.losses) == 4, outcome.output
    return outcome


@pytest.fixture(scope="module")
def cached(repa, tmp_path_factory):
    """Configs that name a cache, and teachers that are no longer asked."""
    place = tmp_path_factory.mktemp("cached")
    files = ("--model", str(repa.folder / "model.json"), "--data", str(repa.folder / "data.json"))
    assert main(["cache-latents", *files, "--output", str(place / "cache"), "--shard-images", "500"]) == 0
    data = json.loads((repa.folder / "data.json").read_text())
    data["dataset_param"]["latents"] = str(place / "cache")
    (place / "data.json").write_text(json.dumps(data))
    (place / "model.json").write_bytes((repa.folder / "model.json").read_bytes())
    return dataclasses.replace(repa, folder=place)


def same(outcome, whole):
    assert outcome.losses == pytest.approx(whole.losses, rel=TOLERANCE), outcome.output


@pytest.mark.parametrize(("ranks", "sharded"), [(1, False), (2, False), (2, True)])
def test_ranks_and_micro_batches_do_not_change_what_is_learned(repa, whole, ranks, sharded):
    fsdp2 = f" --use-torch-fsdp2 --fsdp2-config-path {repa.folder}/auto.yaml" if sharded else ""
    same(repa.run(STEPS + f"--micro-batch-size 4{fsdp2}", ranks), whole)


def test_a_resumed_run_prints_the_same_lines(repa, whole, tmp_path):
    repa.run(STEPS.replace("--train-iters 4", "--train-iters 2") + f"--micro-batch-size 8 --save {tmp_path}")
    last = repa.run(STEPS + f"--micro-batch-size 8 --save {tmp_path} --load {tmp_path}")
    assert last.lines == {iteration: line for iteration, line in whole.lines.items() if iteration > 2}, last.output


def test_a_cache_teaches_what_the_teachers_do(cached, whole):
    """Of a mirrored image it keeps the features of the mirrored image."""
    same(cached.run(STEPS + "--micro-batch-size 8"), whole)


@mindspore.needs_mindspore
def test_mindspore_learns_the_same_from_the_cache(cached, whole):
    """Of two frameworks gradients differ by the rounding of float32, and so do losses after a step."""
    outcome = mindspore.run(cached, STEPS + "--micro-batch-size 8")
    assert outcome.losses == pytest.approx(whole.losses, rel=1e-5), outcome.output


def test_projectors_are_trained_and_saved_and_stay_behind_in_exports(repa, whole, tmp_path):
    found = FORMATS["pytorch"].read(repa.folder / "checkpoints" / "iter_0000004").weights
    projectors = {name: array for name, array in found.items() if name.startswith("projectors.")}
    assert len(projectors) == 12 and all(
        projectors[f"projectors.{n}.{k}.bias"].any() for n in (0, 1) for k in (0, 2, 4)
    )
    assert (
        main(["convert", str(repa.folder / "checkpoints"), str(tmp_path / "export.safetensors"), "--weights", "ema"])
        == 0
    )
    assert read_weights(tmp_path / "export.safetensors").keys() == found.keys() - projectors.keys()
    images = []
    for checkpoint in (repa.folder / "checkpoints", tmp_path / "export.safetensors"):
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


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"predictor": {"z_dims": [16]}}, "asks for 1 projectors, and section teacher names 2"),
        ({"predictor": {"z_dims": [16, 20]}}, "z_dims[1] = 20: the teacher's features have width 24"),
        ({"teacher": [{"model_id": "dino"}] * 2}, "teacher[0].model_id = 'dino': unknown model_id"),
        ({"teacher": [{"model_id": "dinov2", "from_pretrained": "nowhere"}] * 2}, "nowhere"),
        ({"diffusion": {"model_id": "mean_flow"}, "predictor": {"h_embedder": True}}, "not for mean_flow"),
    ],
)
def test_what_does_not_fit_is_named_before_a_step(repa, tmp_path, sections, message):
    configs = Configs(tmp_path)
    for name in ("model.json", "data.json"):
        (tmp_path / name).write_bytes((repa.folder / name).read_bytes())
    if "diffusion" in sections:
        model = json.loads((tmp_path / "model.json").read_text())
        (tmp_path / "model.json").write_text(json.dumps({**model, "diffusion": {}}))
    change(configs, **sections)
    outcome = configs.run(STEPS)
    assert outcome.code == 2 and message in outcome.output and "Traceback" not in outcome.output, outcome.output


def test_a_cache_of_another_teacher_is_refused(cached, tmp_path):
    configs = Configs(tmp_path)
    for name in ("model.json", "data.json"):
        (tmp_path / name).write_bytes((cached.folder / name).read_bytes())
    teachers = json.loads((tmp_path / "model.json").read_text())["teacher"]
    change(configs, teacher=[teachers[0], {**teachers[1], "dtype": "bf16"}])
    outcome = configs.run(STEPS)
    assert outcome.code == 2 and "was made with another teacher" in outcome.output, outcome.output
