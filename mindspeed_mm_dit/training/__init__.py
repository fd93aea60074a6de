"""The run: host, train step, sharding, moving average, learning rate, log."""
