"""Text to image as its user meets it: what is drawn, scored and kept, and what does not fit."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.models.data import open_data
from mindspeed_mm_dit.sampling.load import describe
from mindspeed_mm_dit.sampling.request import ModelRequest
from tests.captions_fixtures import WIDTH, captioned_configs, png, write_beside
from tests.inception_fixtures import write_random_weights
from tests.text_encoder_fixtures import write_clip

TOLERANCE = 2e-6
STEPS = "--train-iters 4 --global-batch-size 4 --lr 1e-3 --lr-decay-style constant "


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return captioned_configs(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def saved(configs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    (folder / "prompts.txt").write_text("a one\n\na two\n")
    flags = f"--save {folder}/checkpoints --sample-interval 4 --sample-prompts {folder}/prompts.txt"
    assert len(configs.done(STEPS + flags).losses) == 4
    return folder


@pytest.fixture(scope="module")
def cached(tmp_path_factory, configs):
    place = tmp_path_factory.mktemp("cached")
    cache(configs, place / "cache")
    param = {"data_folder": str(place / "nowhere"), "latents": str(place / "cache")}
    return configs.copy(place).change("data.json", dataset_param=param)


def cache(configs, output):
    files = ("--model", str(configs.folder / "model.json"), "--data", str(configs.folder / "data.json"))
    assert main(["cache-latents", *files, "--output", str(output), "--shard-images", "5"]) == 0


def sample(saved, output, *flags):
    prompts = ("--prompt", "a seven", "--prompt", "a one moves")
    words = ["sample", "--checkpoint", f"{saved}/checkpoints", *prompts, "--steps", "3", "--output", str(output)]
    return main([*words, *flags])


def test_an_image_depends_on_its_prompt_seed_and_number_alone(saved, tmp_path):
    flags = {"a": (), "b": ("--batch-size", "1"), "c": ("--seed", "1"), "d": ("--negative-prompt", "seven left")}
    for name, own in flags.items():
        assert sample(saved, tmp_path / f"{name}.npz", "--cfg-scale", "3", *own) == 0
    a, b, c = (np.load(tmp_path / f"{name}.npz")["arr_0"].astype(int) for name in "abc")
    assert a.shape == (2, 8, 8, 3) and np.abs(a - b).max() <= 1 and (a != c).any()
    assert sample(saved, tmp_path / "grid.png", "--num-per-prompt", "2") == 0
    assert sample(saved, tmp_path / "a.png", "--classes", "3") == 2


def rows_of(path):
    """Return how many rows a grid has, of 48 pixels, and 38 pixels around them."""
    return (Image.open(path).height - 38) / (48 + 2)


def test_a_run_draws_its_prompts_while_it_learns(saved):
    assert rows_of(saved / "samples/iter_0000004.png") == 2


@pytest.mark.extended
def test_a_run_draws_its_prompts_at_its_end(configs, tmp_path):
    (tmp_path / "prompts.txt").write_text("a one\n\na two\n")
    flags = f"--save {tmp_path}/checkpoints --report always --report-steps 2 --sample-prompts {tmp_path}/prompts.txt"
    outcome = configs.run(STEPS + flags)
    assert outcome.code == 0 and rows_of(tmp_path / "samples.png") == 2, outcome.output


def test_a_model_of_words_alone_says_which_words_it_has_not_learned(tmp_path, capsys):
    configs = captioned_configs(tmp_path)
    model = json.loads((tmp_path / "model.json").read_text())
    model["text_encoder"] = {"model_id": "words", "width": WIDTH, "max_length": 8}
    (tmp_path / "model.json").write_text(json.dumps(model))
    configs.done(STEPS + f"--save {tmp_path}/checkpoints")
    described = describe(ModelRequest(tmp_path / "checkpoints"))
    assert sorted(described.words) == ["a", "left", "moves", "one", "seven", "一"]
    assert sample(tmp_path, tmp_path / "a.png") == 0 and "note: no training caption" not in capsys.readouterr().err
    assert sample(tmp_path, tmp_path / "b.png", "--prompt", "seven zebras") == 0
    assert "'zebras'" in capsys.readouterr().err
    after = configs.run(STEPS + f"--init-from {tmp_path}/checkpoints --save {tmp_path}/after")
    assert after.code == 0 and describe(ModelRequest(tmp_path / "after")).words == ()  # (it knows those of before, too)


@pytest.mark.extended
@pytest.mark.ranks
def test_labels_and_captions_of_two_encoders_steer_together(tmp_path):
    """States of BERT, and the pooled vector of CLIP, which is of another width."""
    configs = captioned_configs(tmp_path)
    bert = json.loads((tmp_path / "model.json").read_text())["text_encoder"]
    clip = {"model_id": "clip", "from_pretrained": str(write_clip(tmp_path / "clip", True)), "max_length": 8}
    labelled = {"num_classes": 2, "pooled_dim": 12, "pooled_encoder": 1}
    configs.change("model.json", predictor=labelled, text_encoder=[bert, clip])
    whole = configs.done(STEPS + f"--save {tmp_path}/out")
    assert len(whole.losses) == 4
    words = ["sample", "--checkpoint", f"{tmp_path}/out", "--steps", "2", "--output", f"{tmp_path}/a.npz"]
    assert main([*words, "--prompt", "a seven", "--classes", "0,1", "--num-per-prompt", "1"]) == 0
    assert np.load(tmp_path / "a.npz")["arr_0"].shape == (2, 8, 8, 3)
    cache(configs, tmp_path / "cache")
    from_cache = configs.change("data.json", dataset_param={"latents": str(tmp_path / "cache")}).run(STEPS)
    assert from_cache.losses == pytest.approx(whole.losses, rel=TOLERANCE), from_cache.output


def changed(configs, predictor=(), text_encoder=(), **param):
    sections = {"predictor": dict(predictor), "text_encoder": dict(text_encoder)}
    return configs.change("model.json", **sections).change("data.json", dataset_param=param)


def refused(configs):
    """Return what opening the data says, before any weights are read."""
    for weights in Path(configs.folder, "bert").glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError) as caught:
        model = load_model_config(configs.folder / "model.json")
        open_data(model, load_data_config(configs.folder / "data.json").dataset_param)
    return str(caught.value)


def test_what_does_not_fit_is_named_before_weights_are_read(tmp_path):
    for changes, message in (
        ({"captions": None}, "has samples with label"),
        ({"predictor": {"text_dim": 32}}, "predictor.text_dim = 32"),
        ({"predictor": {"pooled_dim": 12}}, "predictor.pooled_dim = 12"),
        ({"text_encoder": {"max_length": 4}}, "has a caption of 5 tokens"),
        ({"text_encoder": {"max_length": 99}}, "text_encoder.max_length = 99"),
    ):
        assert message in refused(changed(captioned_configs(tmp_path), **changes))


def test_an_old_cache_beside_a_new_config_is_refused(cached, tmp_path):
    for changes, message in (
        ({"predictor": {"num_classes": 2}}, "has samples without label"),
        ({"text_encoder": {"max_length": 7}}, "was made with another length or padding of texts"),
        ({"image_size": 16, "predictor": {"input_size": 16}}, "was made with another size or crop"),
    ):
        assert message in refused(changed(cached.copy(tmp_path), **changes))


def test_a_cache_of_other_captions_is_refused(tmp_path):
    configs = captioned_configs(tmp_path)
    cache(configs, tmp_path / "cache")
    changed(configs, latents=str(tmp_path / "cache"))
    model, param = load_model_config(tmp_path / "model.json"), load_data_config(tmp_path / "data.json").dataset_param
    assert len(open_data(model, param).rows) == 12
    (tmp_path / "images/first/00.txt").write_text("a seven moves\n")
    with pytest.raises(UserError, match=r"was made with other captions of .*00\.png"):
        open_data(model, param)
    write_beside(tmp_path / "images")
    (tmp_path / "images/first/99.png").write_bytes(png(99))
    (tmp_path / "images/first/99.txt").write_text("a one\n")
    with pytest.raises(UserError, match="was made of 12 images"):
        open_data(model, param)


def evaluate(saved, tmp_path, *flags):
    chain = ("--sampler", "heun", "--steps", "2", "--cfg-scale", "2", "--num", "5", "--batch-size", "4")
    words = ["evaluate", "--checkpoint", f"{saved}/checkpoints", *chain, "--output", f"{tmp_path}/report"]
    return main([*words, *map(str, flags)])


@pytest.mark.extended
def test_prompts_stand_for_classes_in_an_evaluation(saved, configs, tmp_path):
    if importlib.util.find_spec("torch_fidelity") is None:
        pytest.skip("pip install --no-deps torch-fidelity")
    weights = write_random_weights(tmp_path / "random.pth")
    (tmp_path / "prompts.txt").write_text("a seven\na one moves\n")
    flags = ("--prompts", tmp_path / "prompts.txt", "--inception", weights, "--reference", configs.folder / "images")
    assert evaluate(saved, tmp_path, *flags) == 0
    drawn = np.load(tmp_path / "report/samples.npz")
    assert drawn["arr_0"].shape == (5, 8, 8, 3) and drawn["arr_1"].tolist() == [0, 1, 0, 1, 0]
    (tmp_path / "prompts.txt").write_text("a seven\na one\n")
    assert evaluate(saved, tmp_path, *flags) == 2  # the images there are of other prompts


def test_an_evaluation_that_cannot_be_is_named_before_weights_are_read(saved, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a seven\n")
    for flags, message in (
        (("--reference", tmp_path), "--prompts is missing"),
        (("--reference", "digits", "--prompts", tmp_path / "prompts.txt"), "is for class-conditional models"),
    ):
        assert evaluate(saved, tmp_path, *flags) == 2 and message in capsys.readouterr().err
