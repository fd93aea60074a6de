"""What is done with PyTorch."""
