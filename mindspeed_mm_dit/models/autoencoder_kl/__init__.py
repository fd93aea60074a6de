"""AutoencoderKL, the autoencoder of latent diffusion: diffusers' module on PyTorch, ours on other frameworks."""
