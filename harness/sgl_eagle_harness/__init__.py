"""Draft trees, calibration, cost and policies: pure decisions in NumPy."""
