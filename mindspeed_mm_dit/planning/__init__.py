"""Computes what a run will cost from model.json, in closed form: parameters, FLOP, bytes, time. Needs no device and no
framework."""
