"""DPM-Solver++ (2M): equal to diffusers' scheduler, and of second order on an ODE whose solution is known."""

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.objectives.gaussian.process import GaussianDiffusion, dpm_solver_pp
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule, respaced_steps

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
    theirs = DPMSolverMultistepScheduler(
        beta_start=1e-4, beta_end=0.02, beta_schedule=schedule, prediction_type=prediction_type
    )
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


def test_a_single_step_returns_the_predicted_clean_latents():
    diffusion = GaussianDiffusion(Schedule.create("linear", 1000), "sample", "fixed_small")
    wanted = torch.full(SHAPE, 0.3)
    assert torch.equal(sample(diffusion, lambda *_: wanted, torch.randn(SHAPE), 1)[-1], wanted)


def test_clip_bounds_the_result():
    diffusion = GaussianDiffusion(Schedule.create("linear", 1000), "sample", "fixed_small")
    assert sample(diffusion, lambda *_: torch.full(SHAPE, 3.0), torch.randn(SHAPE), 4, clip=1.0)[-1].max() == 1.0
