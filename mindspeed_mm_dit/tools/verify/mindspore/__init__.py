"""What is done with MindSpore."""
