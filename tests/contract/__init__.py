"""The real MindSpeed-MM, unmodified: what we rely on in it, and whole runs where unpacked trees are at hand."""
