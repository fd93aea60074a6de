"""Flow matching as MindSpeed-MM and diffusers have it for Wan: a table of times, and weights that favour its middle."""
