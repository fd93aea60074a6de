"""Metrics loggers, which record the curves and pictures of a run: TensorBoard, Weights & Biases, SwanLab."""
