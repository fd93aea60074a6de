"""mm-dit init --from: small weights of the layouts that mm-dit get makes, and what is made of them."""

import json
import shlex
from contextlib import nullcontext

import numpy as np
import pytest
import yaml
from PIL import Image

from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.arguments import read_train_args
from mindspeed_mm_dit.configs.model import load_model_config, model_config_from_mapping
from mindspeed_mm_dit.configs.tuning import Tuning
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.models.meta import with_tuning
from mindspeed_mm_dit.planning import Placement
from mindspeed_mm_dit.tools.planning.recommend import GIB, Request, recommend
from tests.autoencoder_kl_fixtures import SMALL, our_shapes, write_folder
from tests.captions_fixtures import write_beside
from tests.checkpoint.test_image_pipelines import filled, model_of
from tests.checkpoint.test_pipeline import weights_of
from tests.conftest import ROOT
from tests.tools.tables import refusals
from tests.training.launch import Configs, run


def described(**predictor):
    predictor = {"model_id": "dit", "input_size": 8, "num_classes": 1000, **predictor}
    ae = {"model_id": "autoencoder_kl", "from_pretrained": "weights/sd-vae-ft-ema"}
    return {"ae": ae, "diffusion": {"model_id": "gaussian_diffusion"}, "predictor": predictor}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """weights/ as mm-dit get fills it, DiT as a pipeline and SiT as a file, beside a run's and a narrow network's."""
    here = tmp_path_factory.mktemp("fetched")
    activate("pytorch")
    vae = write_folder(here / "weights/sd-vae-ft-ema", SMALL | {"scaling_factor": 0.5}, our_shapes(SMALL))
    model = described(hidden_size=32, num_layers=2, num_heads=2)
    facts = {"model": model, "classes": ["tench, Tinca tinca", "goldfish", *map(str, range(2, 1000))]}
    FORMATS["safetensors"].write(here / "run.safetensors", State({"model": weights_of(model)}, facts))
    grey = described(hidden_size=32, num_layers=2, num_heads=2, in_channels=1)
    grey["ae"] = {"model_id": "pixel", "channels": 1}
    FORMATS["safetensors"].write(here / "grey.safetensors", State({"model": weights_of(grey)}, {"model": grey}))
    model["ae"]["from_pretrained"] = str(vae)
    FORMATS["safetensors"].write(here / "full.safetensors", State({"model": weights_of(model)}, facts))
    convert(here / "full.safetensors", here / "weights/DiT-XL-2-256", to="pipeline")
    FORMATS["pt"].write(here / "narrow.pt", State({"model": weights_of(model)}))
    (here / "weights/SiT-collections").mkdir()
    small = described(hidden_size=384, num_layers=12, num_heads=6)  # a DiT-S
    FORMATS["pt"].write(here / "weights/SiT-collections/SiT-XL-2-256.pt", State({"model": weights_of(small)}))
    return here


@pytest.fixture
def here(tmp_path, monkeypatch, fetched):
    """Those weights, and 20 images in two classes."""
    monkeypatch.chdir(tmp_path)
    for path in fetched.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for label, name in enumerate(("axolotl", "tench")):
        (tmp_path / "my_images" / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.full((32, 32, 3), 60 * label + number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "my_images" / name / f"{number}.png")
    return tmp_path


def init(flags, memory="8", images="my_images"):
    return main(["init", images, "--output", "config", "--device-memory-gib", memory, *shlex.split(flags)])


def test_images_begin_with_the_published_network_and_train(here, capsys):
    assert init("--from DiT-XL/2") == 0
    said = capsys.readouterr().out
    model = load_model_config(here / "config/model.json")
    sizes = (model.predictor.hidden_size, model.predictor.num_layers, model.predictor.num_heads)
    assert sizes == (32, 2, 2) and model.predictor.num_classes == 2 and model.sample_size[-1] == 16
    assert model.ae.from_pretrained == "weights/DiT-XL-2-256/vae" and model.diffusion.model_id == "gaussian_diffusion"
    words = read_train_args(here / "config/train.args")
    assert words[words.index("--init-from") + 1] == "weights/DiT-XL-2-256" and "--lora-r" not in words
    encode = said.partition("cache-latents ")[2].partition(" &&")[0]
    assert main(["cache-latents", *encode.split()]) == 0
    words = words[: words.index("--report")] + words[words.index("--init-from") :]
    short = "--train-iters 1 --lora-target-modules attn.qkv"
    done = run(Configs(here / "config").command(" ".join([*words, short])), here)
    classes = "1 of 2 classes kept, 1 of 2 classes randomly initialised, the unconditional class kept"
    assert done.code == 0 and classes in done.output


def test_adapters_are_trained_where_the_whole_does_not_fit(here, capsys):
    assert init("--from SiT-XL/2", memory="0.6") == 2
    assert "--from = SiT-XL/2" in capsys.readouterr().err  # does not know these classes, so all of it must be trained
    assert init("--from SiT-XL/2", memory="0.6", images="my_images/tench") == 0
    words = read_train_args(here / "config/train.args")
    assert words[words.index("--lora-target-modules") + 1] == "all" and "--lora-r" in words
    content = json.loads((here / "config/model.json").read_text())
    assert content["diffusion"] == {"model_id": "flow_matching", "path": "linear", "prediction_type": "velocity"}
    assert content["ae"]["from_pretrained"] == "weights/sd-vae-ft-ema" and content["predictor"]["num_heads"] == 6


def test_weights_of_an_earlier_run_describe_themselves(here):
    (here / "my run").mkdir()
    (here / "run.safetensors").rename(here / "my run/it.safetensors")
    assert init("--from 'my run/it.safetensors' --image-size 32") == 0
    words = read_train_args(here / "config/train.args")
    assert words[words.index("--init-from") + 1] == "my run/it.safetensors"
    model = load_model_config(here / "config/model.json")
    assert (model.predictor.input_size, model.ae.from_pretrained) == (16, "weights/sd-vae-ft-ema")


def test_weights_of_grey_images_learn_colours(here, capsys):
    assert init("--from grey.safetensors") == 0
    model, words = load_model_config(here / "config/model.json"), read_train_args(here / "config/train.args")
    assert model.predictor.in_channels == model.ae.channels == 3
    done = run(Configs(here / "config").command(" ".join([*words, "--train-iters 1"])), here)
    assert done.code == 0 and "grey" in done.output, done.output


def test_captions_begin_with_adapters_of_a_network_of_captions(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="requirements/video.txt")
    monkeypatch.chdir(tmp_path)
    write_beside(tmp_path / "my_images")
    assert init("--from SD3.5-medium --image-size 64", memory="24") == 0
    said, folder = capsys.readouterr().out, Configs(tmp_path / "config")
    written = json.loads((tmp_path / "config/model.json").read_text())
    assert written["predictor"] == {"model_id": "sd3", "preset": "SD3.5-medium", "latent_size": [8, 8]}
    small = model_of(tmp_path / "small", "StableDiffusion3Pipeline")
    weights = filled(model_config_from_mapping(small, "small"))
    FORMATS["safetensors"].write(tmp_path / "a.safetensors", State({"model": weights}, {"model": small}))
    convert(tmp_path / "a.safetensors", tmp_path / "weights/stable-diffusion-3.5-medium", to="pipeline")
    sizes = small["predictor"] | {"latent_size": [32, 32]}  # (those of the small weights in place of the published)
    texts = [own | {"max_length": 12} for own in written["text_encoder"]]
    vae = {"model_id": "autoencoder_kl", "from_pretrained": "weights/stable-diffusion-3.5-medium/vae"}
    folder.change("model.json", predictor=sizes, ae=vae, text_encoder=texts)
    assert main(["cache-latents", *said.partition("cache-latents ")[2].partition(" &&")[0].split()]) == 0
    words = read_train_args(tmp_path / "config/train.args")
    done = run(folder.command(" ".join([*words, "--train-iters 2"])), tmp_path)
    assert done.code == 0 and "to_q" in " ".join(words), done.output


def test_weights_that_no_device_holds_are_offloaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide").mkdir()
    for number in range(4):
        Image.fromarray(np.full((32, 48, 3), number, np.uint8)).save(tmp_path / f"wide/{number}.png")
        (tmp_path / f"wide/{number}.txt").write_text(f"number {number}")
    assert init("--from FLUX.1-dev", memory="24", images="wide") == 0
    assert yaml.safe_load((tmp_path / "config/fsdp2.yaml").read_text())["offload_to_cpu"] is True
    assert "--use-torch-fsdp2" in read_train_args(tmp_path / "config/train.args")
    assert "cut to squares" in (said := capsys.readouterr().out) and "lose 33%" in said


@pytest.mark.parametrize(("gib", "is_offloaded"), [(0, False), (40, False), (64, True)])
def test_offloading_needs_room_in_the_machine(gib, is_offloaded):
    model = with_tuning(load_model_config(ROOT / "examples/dit/flux_lora/model.json"), Tuning(("to_q",), 16, 16))
    request = Request(Placement(), 24 * GIB, 1, online_vae=False, machine_bytes=gib * GIB)
    with nullcontext() if is_offloaded else pytest.raises(ConfigError):
        assert recommend(model, request).placement.offloaded


@refusals("""
--from DiT-XL/2-512 | mm-dit get DiT-XL/2-512
--from Wan2.1-1.3B | videos
--from SD3.5-medium | captions
--from SD3.5-medium --vae weights/sd-vae-ft-ema
--from nothing
--from FLUX.1 | 'FLUX.1-dev'
--from weights/sd-vae-ft-ema | autoencoder
--from weights/SiT-collections/SiT-XL-2-256.pt | which autoencoder
--from narrow.pt --vae weights/sd-vae-ft-ema | attention heads
""")
def test_weights_that_cannot_be_begun_with_are_refused(here, capsys, flags, named):
    assert init(flags) == 2
    assert named in capsys.readouterr().err and not (here / "config").exists()
