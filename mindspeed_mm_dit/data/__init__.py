"""From files to batches: index, transforms, random draws, order, loader. NumPy and Pillow, no framework."""
