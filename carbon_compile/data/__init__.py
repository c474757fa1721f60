"""Data sets shipped for the demo, with their attribution."""
