"""The run: train step, sharding, moving average, learning rate, log."""
