"""What the examples share: toy models, their data, and the part of each framework."""
