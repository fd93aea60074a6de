"""Training runs: train step, sharding, EMA, learning rate and log."""
