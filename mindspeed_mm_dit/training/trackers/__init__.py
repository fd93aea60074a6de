"""Where the curves and pictures of a run go: TensorBoard, Weights & Biases, SwanLab, by one contract."""
