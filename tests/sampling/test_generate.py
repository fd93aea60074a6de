"""What an image is made of: which draws start and disturb its chain, and how floats become pixels."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.model import model_config_from_mapping
from mindspeed_mm_dit.data.order import Stream, normals
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.autoencoder import to_images, to_pixels
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion
from mindspeed_mm_dit.sampling import generate as module
from mindspeed_mm_dit.sampling.conditions import SampleConditions, check_conditions
from mindspeed_mm_dit.sampling.generate import decode, generate, trajectory_states, with_defaults
from mindspeed_mm_dit.sampling.load import CheckpointDescription
from mindspeed_mm_dit.sampling.request import SampleRequest
from tests.parts import models

CLIPS = next(model for model in models() if len(model.sample_size) == 3)


def pixels_of(values):
    return to_pixels(np.asarray(values, np.float32).reshape(1, 1, 1, -1)).ravel().tolist()


def test_samples_become_the_pixels_that_training_made_images_of():
    """Training turns level k into k / 127.5 - 1; a level reaches half a step to either side, and the ends further."""
    for shift in (-0.49, 0.0, 0.49):
        assert pixels_of(to_images(torch.arange(256)).numpy() + shift / 127.5) == [*range(256)]
    assert pixels_of([-9.0, -1.01, 1.01, 9.0]) == [0, 0, 255, 255]
    assert pixels_of([-1.0, -0.5, 0.0, 0.5, 1.0]) == [0, 64, 128, 191, 255]


def without_guidance(config, **settings):
    """A request with the defaults of a model, but for guidance."""
    return with_defaults(SampleRequest(**{"guidance": 1.0, "channels": "all", **settings}), config)


@pytest.fixture
def config(model_json):
    return model_config_from_mapping(model_json, "model.json")


@pytest.fixture
def model(config):
    """A network that answers with its label, and notes what it is asked."""
    asked = []

    def predictor(x, t, y):
        asked.append((x.clone(), t.tolist(), y.tolist()))
        return torch.zeros_like(x) + y.reshape(-1, 1, 1, 1) / 10

    diffusion = GaussianDiffusion.from_config(config.diffusion)
    ae = SimpleNamespace(decode=lambda latents: latents)
    return SimpleNamespace(predictor=predictor, diffusion=diffusion, ae=ae, text_encoders=(), asked=asked)


@pytest.mark.cpu
def test_a_chain_starts_and_is_disturbed_by_the_draws_of_its_image(model, config):
    """Beside the same chain without noise, what is added at each step is that step's draw."""
    numbers, labels = np.array([3, 70_000]), np.array([1, 2])
    settings = without_guidance(config, steps=4, seed=2**62 + 5)
    found = list(trajectory_states(model, config, {"labels": labels}, numbers, settings))
    start = normals(settings.seed, Stream.SAMPLE_START, numbers, config.latent_shape)
    np.testing.assert_array_equal(model.asked[0][0].numpy(), start)
    assert [t for _, t, _ in model.asked] == [[999] * 2, [666] * 2, [333] * 2, [0] * 2]
    assert all(y == labels.tolist() for _, _, y in model.asked) and len(found) == 4
    chain = model.diffusion.respaced([0, 333, 666, 999])
    x = torch.from_numpy(start)
    for step, state in enumerate(found):
        index = torch.full((2,), 3 - step)
        output = torch.zeros_like(x) + torch.tensor([0.1, 0.2]).reshape(-1, 1, 1, 1)
        predicted = chain.predict(output, x, index)
        noise = normals(settings.seed, Stream.SAMPLE_NOISE, numbers, config.latent_shape, block=step)
        scale = (0.5 * predicted.log_variance).exp() if step < 3 else 0.0
        x = predicted.mean + scale * torch.from_numpy(noise)
        torch.testing.assert_close(state, x)
    model.asked.clear()  # a guided chain asks for the null class too
    settings = without_guidance(config, steps=2, guidance=3.0)
    list(trajectory_states(model, config, {"labels": np.array([1, 2])}, np.arange(2), settings))
    assert [y for _, _, y in model.asked] == [[1, 2, 10, 10]] * 2


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_images_do_not_depend_on_the_batch_size(model, config, batch_size):
    done, conditions = [], SampleConditions({"label": [0, 1, 2, 3, 9]})
    settings = without_guidance(config, steps=3, options={"clip": 1.0})
    images = generate(model, config, conditions, replace(settings, batch_size=batch_size, on_step=done.append))
    np.testing.assert_array_equal(images, generate(model, config, conditions, settings))
    assert images.shape == (5, 8, 8, 1) and sum(done) == 15 and max(done) <= batch_size
    assert len({image.tobytes() for image in images}) == 5


@pytest.mark.parametrize(("points", "shown"), [(1, [5]), (2, [0, 5]), (3, [0, 2, 5]), (6, range(6))])
def test_path_shows_states_from_the_first_to_the_last(model, config, points, shown):
    conditions, settings = SampleConditions({"label": [3]}), without_guidance(config, steps=6)
    whole = generate(model, config, conditions, replace(settings, path=6))
    states_shown = generate(model, config, conditions, replace(settings, path=points))
    assert len({state.tobytes() for state in whole[0]}) == 6
    np.testing.assert_array_equal(states_shown if points > 1 else states_shown[:, None], whole[:, list(shown)])


def test_chain_and_guidance_are_those_of_the_model_unless_named(config):
    def guidance(**settings):
        request = with_defaults(SampleRequest(**settings), config)
        return request.guidance, request.channels

    usual, weaker = with_defaults(SampleRequest(), config), SimpleNamespace(description=CheckpointDescription(config))
    assert (usual.sampler, usual.steps, usual.options, usual.interval) == ("ddpm", 250, {}, (0.0, 1.0))
    assert [guidance(), guidance(channels="all"), guidance(weaker=weaker)] == [(4.0, "3"), (4.0, "all"), (4.0, "all")]
    named = SampleRequest(sampler="ddim", steps=7, options={"clip": np.float64(1)}, rescale="token")
    named = with_defaults(named, config)
    assert (named.sampler, named.steps, named.rescale) == ("ddim", 7, "token")
    assert named.options == {"clip": 1.0} and type(named.options["clip"]) is float
    assert with_defaults(SampleRequest(), CLIPS).steps == 50


def test_settings_beyond_the_model_are_refused_by_flag(config, model_json):
    for label in (-1, 10):
        with pytest.raises(ConfigError, match=r"--classes.* 0 \.\.\. 9"):
            check_conditions(SampleConditions({"label": [9, 0, label]}), config)
    model_json["predictor"]["class_dropout_prob"] = 0.0
    never = model_config_from_mapping(model_json, "model.json")
    assert with_defaults(SampleRequest(steps=1, guidance=1.0), never).guidance == 1.0
    for of, words, given in (
        (config, "--cfg-channels = 3", {"channels": "3"}), (CLIPS, "--cfg-rescale = token", {"rescale": "token"}),
        (config, "--seed = -1", {"seed": -1}), (config, "--steps = 0", {"steps": 0}),
        (config, "--bf16 = 'yes'", {"bf16": "yes"}), (config, "--clip = -1", {"options": {"clip": -1}}),
        (config, "--low-noise-cfg-scale = 2.0", {"low_noise_guidance": 2.0}),
        (never, "--cfg-scale = 1.5.*null class", {"steps": 1, "guidance": 1.5}),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^{words}"):
            with_defaults(SampleRequest(**given), of)


def test_images_are_decoded_by_a_number_of_pixels(monkeypatch):
    monkeypatch.setattr(module, "DECODED_PIXELS", 40)
    latents, decoded = torch.arange(14.0).reshape(7, 2, 1, 1), []
    ae = SimpleNamespace(decode=lambda latents: decoded.append(len(latents)) or latents + 1)
    for size, batches in ((2, [7]), (4, [2, 2, 2, 1]), (5, [1] * 7), (9, [1] * 7)):
        decoded.clear()
        np.testing.assert_array_equal(decode(ae, latents, size**2), latents.numpy() + 1)
        assert decoded == batches


def test_clip_bounds_the_clean_image(model, config):
    """Far beyond the bound, every clean image is the bound itself, and so is the last state."""
    far = SimpleNamespace(**{**vars(model), "predictor": lambda x, t, y: torch.full_like(x, -1e6)})

    def last(**options):
        settings = without_guidance(config, sampler="ddim", steps=5, options=options)
        *_, state = trajectory_states(far, config, {"labels": np.array([1])}, np.arange(1), settings)
        return state

    for clip in (0.5, 2.0):
        torch.testing.assert_close(last(clip=clip), torch.full_like(last(), clip), rtol=1e-4, atol=0)
    assert last().min() > 1000
