"""State on disk: which checkpoints are complete, and how each framework writes and reads one."""
