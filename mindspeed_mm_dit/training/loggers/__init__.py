"""Trackers, which keep the curves and pictures of a run: TensorBoard, Weights & Biases, SwanLab."""
