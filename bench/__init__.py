"""Measurements: each file runs one job against its peers and prints JSON lines and a table."""
