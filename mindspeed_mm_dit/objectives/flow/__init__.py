"""Flow matching with stochastic interpolants (SiT; Ma et al. 2024): from noise at t = 0 to data at t = 1."""
