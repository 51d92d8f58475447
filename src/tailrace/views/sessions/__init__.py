"""Telemetry sessions: samples of many channels, recorded, served live, and read again."""
