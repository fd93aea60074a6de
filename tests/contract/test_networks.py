"""Networks of joint attention, and Wan 2.2, in the real MindSpeed-MM, by either of its routes, against our own host."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest

pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.condition import TextCondition
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.torch_file import write_torch_file
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.models.autoencoder import NoAutoencoder
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.objectives.registry import training_draw
from tests.captions_fixtures import WIDTH, captioned_configs
from tests.contract.hosted import TwoHosts, needs_trees, train_in_sora
from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.models.test_image_transformers import OURS
from tests.training.test_image_to_video import NETWORKS, begun_configs, clips

__all__ = ["clips"]
pytestmark = pytest.mark.ranks
STEPS = 3
CLOSE = {"rel": 2e-6}
LORA = "--lora-target-modules transformer_blocks.{*}.attn.to_q --lora-r 4 --lora-alpha 8 --lr 1e-2 --init-from base"


def write_family(name, location):
    """Write configs of a small network of the family, which learns a few captioned images, to ``location``."""
    captioned_configs(location)
    model = json.loads((location / "model.json").read_text())
    width = 2 * WIDTH if name == "sd3" else WIDTH  # of two encoders side by side
    pooled = {"pooled_projection_dim": width} if hasattr(OURS[name], "pooled_projection_dim") else {}
    sizes = {"num_attention_heads": 2, "in_channels": 3, "latent_size": (8, 8), "joint_attention_dim": width}
    predictor = dataclasses.replace(OURS[name], **sizes, **pooled)
    parts = [part for text in predictor.conditions if isinstance(text, TextCondition) for part in text.parts]
    model["text_encoder"] = [model["text_encoder"]] * (1 + max(part.encoder for part in parts))
    model["diffusion"] |= {"data_time": predictor.data_time}
    model["predictor"] = dataclasses.asdict(predictor)
    (location / "model.json").write_text(json.dumps(model))
    blocks = [f"predictor.{stem}.{{*}}" for stem in parameters_of(predictor).block_prefixes]
    (location / "fsdp2.yaml").write_text(json.dumps({"sharding_size": "auto", "sub_modules_to_wrap": blocks}))


def write_expert(name, location, clips):
    """Write configs of an expert of Wan 2.2, whose clips begin with an image, to ``location``."""
    begun_configs(location, clips, name)
    model = json.loads((location / "model.json").read_text())
    model["diffusion"]["timestep_window"] = [0.875, 1]
    (location / "model.json").write_text(json.dumps(model))
    (location / "fsdp2.yaml").write_text("sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n")


@pytest.fixture(scope="module")
def networks(tmp_path_factory, digits_folder, clips):
    """Name of a network -> its configs, and what three steps of our own host on one rank print."""

    @cache
    def network(name):
        runs = NativeAndStandalone(tmp_path_factory.mktemp("network"), digits_folder)
        if name in OURS:
            write_family(name, runs.folder)
        else:
            write_expert(name, runs.folder, clips)
        return runs, good(runs.train("standalone", STEPS, "--save base", fsdp2=False))

    return network


def good(outcome):
    assert outcome.losses.keys() == set(range(1, STEPS + 1)), outcome.output[-4000:]
    return outcome


@needs_trees
@pytest.mark.parametrize("name", (*OURS, *NETWORKS))
def test_networks_learn_the_same_by_the_old_route(networks, name):
    runs, here = networks(name)
    there = good(TwoHosts.train(runs, "mindspeed-mm", STEPS, "--micro-batch-size 2", ranks=2))
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
@pytest.mark.parametrize("name", (*OURS, *NETWORKS))
@pytest.mark.parametrize("flags", ["", "--context-parallel-size 2"])
def test_networks_learn_the_same_in_the_native_engine(networks, name, flags):
    runs, here = networks(name)
    there = good(runs.train("mindspeed-mm-native", STEPS, flags, ranks=2))
    assert there.losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
def test_adapters_of_a_family_learn_the_same_in_the_engine(networks):
    runs, _ = networks("flux")
    here = good(runs.train("standalone", STEPS, LORA, fsdp2=False))
    assert good(runs.train("mindspeed-mm-native", STEPS, LORA, 4)).losses == pytest.approx(here.losses, **CLOSE)


@needs_engine
@pytest.mark.parametrize("name", ["flux", "channels"])
def test_network_is_written_as_a_folder_of_diffusers(networks, name):
    runs, here = networks(name)
    path = runs.yaml("written", STEPS, "--save written", fsdp2=False, training__save_format="hf")
    assert good(runs.engine(path)).losses == pytest.approx(here.losses, **CLOSE)
    predictor = load_model_config(runs.folder / "model.json").predictor
    written = diffusers_folder.read(runs.folder / "written/hf").weights
    assert written.keys() == parameters_of(predictor).shapes().keys()


@needs_trees
@pytest.mark.parametrize("name", OURS)
def test_script_of_the_host_begins_with_the_same_loss(name, tmp_path):
    folder, draw = tmp_path / "sora", np.random.default_rng(0)
    folder.mkdir()
    write_family(name, tmp_path)
    model = model_config_from_mapping(json.loads((tmp_path / "model.json").read_text()), "model.json")
    given = list(model.predictor.conditions.examples(8).values())
    drawn = training_draw(model.diffusion)(1234, np.arange(8), model.latent_shape)
    latents = draw.standard_normal((8, *model.latent_shape), np.float32)
    for row in range(8):
        prompts = [array[row] for array in given]
        sample = {"video": latents[row], "prompt_ids": prompts if len(given) > 1 else prompts[0]}
        sample |= {"prompt_mask": np.ones(1, np.float32)} | {f"drawn_{key}": draws[row] for key, draws in drawn.items()}
        write_torch_file(folder / f"{row}.pt", sample)
    whole = dataclasses.asdict(model)
    features = {"task": "t2i", "load_video_features": True, "load_text_features": True}
    sections = {key: whole[key] for key in ("ae", "diffusion", "predictor")}
    sections["predictor"]["num_heads"] = 2  # which the host asks for
    data = {"dataset_type": "feature", "preprocess_parameters": {}}
    data["basic_parameters"] = {"data_path": str(folder / "index.json"), "data_folder": str(folder)}
    loader = {"dataloader_mode": "sampler", "shuffle": False, "drop_last": True}
    (folder / "model.json").write_text(json.dumps(sections | features))
    (folder / "data.json").write_text(json.dumps({"dataset_param": data, "dataloader_param": loader}))
    (folder / "index.json").write_text(json.dumps([{"file": f"{row}.pt"} for row in range(8)]))
    ours = DiTModel(model, NoAutoencoder(model.ae))
    runtime.load_arrays(ours.predictor, ours.initial_weights(1234))
    losses = ours.losses(*map(ops.tensor, (latents, *given, *drawn.values())))
    there = train_in_sora(tmp_path, 1)
    assert there.losses == pytest.approx({1: losses.mean().item()}, **CLOSE), there.output[-4000:]
