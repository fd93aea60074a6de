"""What a run will cost, in closed form from model.json: parameters, FLOP, bytes, time. No device, no framework."""
