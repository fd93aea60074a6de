"""The programs that run a training: our own, and MindSpeed-MM's; chosen once."""
