"""The maths of diffusion, once for every framework: schedules, noising, losses, samplers, guidance."""
