"""What a network learns and how its answers are walked back to data: one folder an objective."""
