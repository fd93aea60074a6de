"""MeanFlow (Geng et al. 2025): the average velocity over an interval of times; t = 0 is data, t = 1 noise."""
