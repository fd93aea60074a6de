"""Flow matching as in MindSpeed-MM and diffusers for Wan: a table of times, with weights that favour its middle."""
