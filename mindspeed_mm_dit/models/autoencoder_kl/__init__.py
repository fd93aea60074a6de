"""AutoencoderKL, the autoencoder of latent diffusion: on PyTorch diffusers' module, else ours."""
