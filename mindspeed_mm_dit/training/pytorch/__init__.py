"""The train step on PyTorch: parallelism, optimizer, moving average, checkpoint state."""
