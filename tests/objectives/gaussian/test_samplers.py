import functools

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.configs.diffusion import GaussianDiffusionConfig
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion, ddim, ddpm, dpm_solver_pp
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule, respaced_steps
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network, projection_loss, switch_experts
from mindspeed_mm_dit.objectives.registry import find_sampler

SCALE = 0.5  # data ~ N(0, SCALE**2): the best prediction is known in closed form

SAMPLERS = {"ddpm": ddpm, "ddim": ddim, "dpm++": dpm_solver_pp}


def optimal_predict(diffusion):
    """The best epsilon prediction for Gaussian data: E[noise | x_t]."""

    def predict(x, t, timestep):
        signal = diffusion.at("alphas_cumprod", t, x)
        return x * (1 - signal) ** 0.5 / (signal * SCALE**2 + 1 - signal)

    return predict


@pytest.mark.parametrize(("name", "steps"), [("ddpm", "1000"), ("ddim", "ddim100")])
def test_samples_of_a_perfect_network_have_the_spread_of_the_data(name, steps):
    full = GaussianDiffusion.from_config(GaussianDiffusionConfig(variance_type="fixed_small"))
    generator = torch.Generator().manual_seed(0)
    noise = lambda step: torch.randn(4096, 1, 2, 2, generator=generator)  # noqa: E731
    trajectory = full.respaced(respaced_steps(1000, steps))
    *_, last = SAMPLERS[name](trajectory, optimal_predict(full), noise(0), noise)
    assert last.std().item() == pytest.approx(SCALE, rel=0.03)


@pytest.mark.parametrize(("name", "timesteps"), [("ddpm", [0, 333, 666, 999]), ("dpm++", [0, 333, 666, 999]),
                                                   ("ddim", [0, 250, 500, 750])])  # fmt: skip
def test_each_sampler_visits_the_timesteps_of_its_paper(name, timesteps):
    config, asked = GaussianDiffusionConfig(variance_type="fixed_small"), []

    def model_fn(x, t, noise):
        asked.append((t.tolist(), round(noise * 999)))
        return x

    sampler, process = find_sampler(config, name), GaussianDiffusion.from_config(config)
    list(sampler.trajectory(process, model_fn, torch.zeros(1, 1), lambda step: torch.zeros(1), 4, sampler.options()))
    assert asked == [([t], t) for t in reversed(timesteps)]


@pytest.mark.parametrize("name", ["ddpm", "ddim"])
def test_clip_bounds_the_predicted_clean_latents(name):
    """With a network that predicts 3 or -3 the last state, which is x_0, is the bound."""
    config = GaussianDiffusionConfig(100, prediction_type="sample", variance_type="fixed_small")
    diffusion = GaussianDiffusion.from_config(config)
    for answer, clip, reached in ((3.0, 1.0, 1.0), (-3.0, 1.0, -1.0), (3.0, None, 3.0), (-3.0, None, -3.0)):
        network = functools.partial(lambda answer, x, *_: torch.full_like(x, answer), answer)
        states = SAMPLERS[name](diffusion, network, torch.zeros(1, 1), lambda step: torch.zeros(1), clip=clip)
        *_, last = states
        torch.testing.assert_close(last, torch.full_like(last, reached), rtol=1e-4, atol=0)


def test_an_unknown_sampler_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'ddim'"):
        find_sampler(GaussianDiffusionConfig(), "dddim")


class TestGuidance:
    labelled, unlabelled = torch.full((1, 8, 2, 2), 2.0), torch.full((1, 8, 2, 2), 1.0)

    @pytest.mark.parametrize(("channels", "of", "guided"), [("3", 4, 3), ("all", 4, 4), ("3", 1, 1)])
    def test_only_the_guided_channels_move_and_none_at_scale_one(self, channels, of, guided):
        given = self.labelled[:, : 2 * of], self.unlabelled[:, : 2 * of]
        out = Guidance(3.0, channels).combine(*given, of)
        assert (out[:, :guided] == 4.0).all() and (out[:, guided:] == 2.0).all()
        assert torch.equal(Guidance(1.0).combine(*given, of), given[0])

    def test_network_is_asked_once_outside_the_interval(self):
        asked = []

        def network(x, t, y):
            asked.append(y.tolist())
            return x

        predict = guided_network(network, [torch.tensor([1])], [torch.tensor([9])], Guidance(2.0, "all", (0.2, 0.5)))
        x = torch.zeros(1, 4, 2, 2)
        for timestep in (900, 300, 10):
            predict(x, torch.tensor([timestep]), timestep / 999)
        assert asked == [[1], [1, 9], [1]]

    def test_only_samples_within_the_interval_are_guided(self):
        def network(x, t, y):
            return x + y.reshape(-1, 1, 1, 1)

        given, unconditional = torch.tensor([1, 2, 3]), torch.tensor([0, 0, 0])
        predict = guided_network(network, [given], [unconditional], Guidance(2.0, "all", (0.2, 0.5)))
        found = predict(torch.zeros(3, 4, 2, 2), torch.zeros(3), np.array([0.9, 0.3, 0.1]))
        assert found.shape == (3, 4, 2, 2) and found[:, 0, 0, 0].tolist() == [1, 4, 3]
        assert (found == found[:, :1, :1, :1]).all()

    def test_both_questions_are_about_the_same_noise_and_time(self):
        """A network that answers with all it is given, twice the channels: the guided answer can be told by hand."""

        def network(x, t, y):
            told = x + 10 * t.reshape(-1, 1, 1, 1) + 100 * y.reshape(-1, 1, 1, 1)
            return torch.cat([told, -told], 1)

        predict = guided_network(network, [torch.tensor([1, 2, 3])], [torch.tensor([0, 0, 0])], Guidance(3.0, "3"))
        x, t = torch.rand(3, 4, 1, 2), torch.tensor([7, 7, 7])
        without = x + 70
        labelled = without + 100 * torch.tensor([1, 2, 3]).reshape(-1, 1, 1, 1)
        guided = torch.cat([without[:, :3] + 3 * (labelled - without)[:, :3], labelled[:, 3:], -labelled], 1)
        torch.testing.assert_close(predict(x, t, 0.007), guided)
        plain = guided_network(network, [torch.tensor([1, 2, 3])], [torch.tensor([0, 0, 0])], Guidance(1.0))
        torch.testing.assert_close(plain(x, t, 0.007), torch.cat([labelled, -labelled], 1))

    @pytest.mark.parametrize(
        ("interval", "guided"),
        [((0.2, 0.6), range(2, 7)), ((0.21, 0.59), range(3, 6)), ((0.0, 1.0), range(11)), ((0.5, 0.5), [5])],
    )
    def test_both_ends_of_the_interval_are_guided(self, interval, guided):
        """The timesteps of a chain of 11 are 0.0, 0.1, ... 1.0 of it."""
        guidance = Guidance(2.0, "all", interval)
        assert [t for t in range(11) if guidance.applies_at(t / 10)] == list(guided)
        assert not any(Guidance(1.0, "all", interval).applies_at(t / 10) for t in range(11))
        assert Guidance(0.0).applies_at(0) and Guidance(0.0).applies_at(1)

    def test_impossible_guidance_is_refused(self):
        for interval in ((0.8, 0.2), (-0.01, 0.5), (0.5, 1.01), (np.nan, 1.0)):
            with pytest.raises(ConfigError, match="low <= high"):
                Guidance(2.0, "all", interval)
        for scale in (-0.01, np.inf, np.nan):
            with pytest.raises(ConfigError, match=f"--cfg-scale = {scale}"):
                Guidance(scale)
        for channels in ("2", 3, ["all"]):
            with pytest.raises(ConfigError, match="--cfg-channels = "):
                Guidance(2.0, channels)


def test_from_the_boundary_on_the_expert_of_high_noise_answers():
    model_fn = switch_experts(0.5, *(lambda *asked, name=name: name for name in ("high", "low")))
    assert [model_fn(None, None, noise) for noise in (0.4, 0.5, np.array([0.5, 0.9]))] == ["low", "high", "high"]


def test_projection_loss_is_least_along_the_features_of_each_sample():
    features = [torch.randn(3, 4, width) for width in (5, 7)]
    exact = [2.5 * feature for feature in features]
    torch.testing.assert_close(projection_loss(exact, features, [1, 1]), torch.full((3,), -1.0))
    torch.testing.assert_close(projection_loss([exact[0], -exact[1]], features, [1, 1]), torch.zeros(3))
    torch.testing.assert_close(projection_loss(exact, features, [0.5, 2]), torch.full((3,), -1.25))
    features = torch.randn(3, 4, 5)
    signs = torch.tensor([1.0, -1, 1])
    torch.testing.assert_close(projection_loss([features * signs[:, None, None]], [features], [1]), -signs)


SHAPE = (2, 3, 4, 4)


def sample(diffusion, predict, start, steps, clip=None):
    trajectory = diffusion.respaced(respaced_steps(len(diffusion.schedule), str(steps)))
    states = list(dpm_solver_pp(trajectory, predict, start, lambda step: None, clip=clip))
    assert len(states) == steps
    return states


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("schedule", ["linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("steps", [5, 20])
def test_agrees_with_diffusers_at_the_same_timesteps(prediction_type, schedule, steps):
    from diffusers import DPMSolverMultistepScheduler

    diffusion = GaussianDiffusion(Schedule.create(schedule, 1000), prediction_type, "fixed_small")
    weights = torch.randn(3, 3, generator=torch.Generator().manual_seed(1)) * 0.3
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))

    def predict(x, t, timestep):
        return torch.tanh(torch.einsum("oc,bchw->bohw", weights, x) + timestep / 1000)

    ours = sample(diffusion, predict, start, steps)[-1]
    betas = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": schedule}
    theirs = DPMSolverMultistepScheduler(**betas, prediction_type=prediction_type)
    # Its own table is a float32 product, 5e-4 off in 1 - alpha-bar near the clean end of the cosine schedule.
    theirs.alphas_cumprod = torch.tensor(diffusion.schedule.alphas_cumprod)
    theirs.set_timesteps(timesteps=respaced_steps(1000, str(steps))[::-1].tolist())
    x = start
    for timestep in theirs.timesteps:
        x = theirs.step(predict(x, None, int(timestep)), timestep, x).prev_sample
    # float32 rounding; an error in any coefficient shows at 1e-2
    assert float((ours - x).norm() / x.norm()) < 1e-4


def test_the_error_falls_with_the_square_of_the_step():
    """For Gaussian data the ideal prediction and the ODE's solution are known in closed form."""
    mean, deviation, total = 0.7, 0.5, 10_000
    diffusion = GaussianDiffusion(Schedule.create("linear", total), "sample", "fixed_small")
    signal = diffusion.schedule.alphas_cumprod

    def spread(a):
        return np.sqrt(a * deviation**2 + 1 - a)

    def ideal(x, t, timestep):
        a = signal[timestep]
        return mean + np.sqrt(a) * deviation**2 / spread(a) ** 2 * (x - np.sqrt(a) * mean)

    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    z = (start - np.sqrt(signal[-1]) * mean) / spread(signal[-1])
    errors = []
    for steps in (50, 100, 200):
        before_last = sample(diffusion, ideal, start, steps)[-2]  # the last step is of first order
        errors.append(float((before_last - np.sqrt(signal[0]) * mean - spread(signal[0]) * z).norm()))
    slopes = np.log2(np.array(errors[:-1]) / errors[1:])
    assert (slopes > 1.7).all(), (errors, slopes)


def test_dpm_solver_gives_the_predicted_latents_within_the_clip():
    diffusion = GaussianDiffusion(Schedule.create("linear", 1000), "sample", "fixed_small")
    wanted = torch.full(SHAPE, 0.3)
    assert torch.equal(sample(diffusion, lambda *_: wanted, torch.randn(SHAPE), 1)[-1], wanted)
    diffusion = GaussianDiffusion(Schedule.create("linear", 1000), "sample", "fixed_small")
    assert sample(diffusion, lambda *_: torch.full(SHAPE, 3.0), torch.randn(SHAPE), 4, clip=1.0)[-1].max() == 1.0
