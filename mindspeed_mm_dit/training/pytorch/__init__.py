"""The train step on PyTorch: parallelism, optimizer, EMA, checkpoint state."""
