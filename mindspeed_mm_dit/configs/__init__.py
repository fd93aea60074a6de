"""What a run is: strict JSON, YAML and flags read into frozen dataclasses. No framework."""
