"""The Gaussian diffusion of the DiT paper: schedule, process, samplers (Ho et al. 2020; Nichol & Dhariwal 2021)."""
