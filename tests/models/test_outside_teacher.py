"""A teacher of another package: the brightness of each patch, learned beside the images."""

import json

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.images import DatasetParam
from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.configs.teacher import Dinov2Config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import check_sizes
from mindspeed_mm_dit.models.registry import TEACHERS, register_teacher
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.external.teacher import BRIGHTNESS


@pytest.fixture
def config():
    register_teacher("brightness", BRIGHTNESS)
    predictor = {"model_id": "dit", "input_size": 8, "in_channels": 1, "patch_size": 2, "hidden_size": 16,
                 "num_layers": 2, "num_heads": 2, "num_classes": 3, "learn_sigma": False}  # fmt: skip
    learned = {"z_dims": [1], "projector_dim": 8, "encoder_depth": 2}
    yield lambda weight: model_config_from_mapping(
        {"ae": {"model_id": "pixel", "channels": 1}, "diffusion": {"model_id": "flow_matching"},
         "teacher": {"model_id": "brightness", "weight": weight}, "predictor": predictor | learned}, "model.json",
    )  # fmt: skip
    del TEACHERS["brightness"]


def test_its_part_in_the_loss_has_its_weight_and_trains_the_network(config):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8)).astype(np.uint8)
    losses, gradients = [], []
    for weight in (0.0, 0.5, 1.0):
        model = DiTModel(config(weight))
        for number, value in enumerate(model.predictor.parameters()):
            value.data = 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(number))
        draws = training_draw(config(weight).diffusion)(0, np.arange(3), (1, 8, 8))
        batch = {"pixels": pixels, "labels": np.arange(3), **draws}
        loss = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        loss.mean().backward()
        losses.append(loss.detach())
        gradients.append(model.predictor.blocks[0].attn.qkv.weight.grad)
    torch.testing.assert_close(losses[2] - losses[0], 2 * (losses[1] - losses[0]))
    assert (losses[2] != losses[0]).any() and not torch.equal(gradients[0], gradients[2])
    assert config(0.5).without_teachers().predictor.z_dims == ()


def test_images_of_several_shapes_are_refused_beside_a_teacher(config):
    param = DatasetParam("images", buckets=((8, 8), (8, 12)), bucket_group=1)
    with pytest.raises(ConfigError, match=r"buckets: make latents of several shapes, but a teacher's features have"):
        check_sizes(config(0.5), param)
    check_sizes(config(0.5).without_teachers(), param)


def test_a_folder_whose_config_says_no_width_is_named(tmp_path):
    for content, named in (
        ({"model_type": "vit", "hidden_size": 16}, "is not a dinov2"),
        ({"model_type": "dinov2", "hidden_size": "16"}, "config.json has hidden_size = 16"),
        ({"model_type": "dinov2"}, "config.json has hidden_size = None"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"teacher.from_pretrained = {tmp_path}: {named}"):
            Dinov2Config(from_pretrained=str(tmp_path)).width()
