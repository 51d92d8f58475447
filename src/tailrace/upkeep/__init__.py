"""Upkeep: what is done to views after they were written: packing, retention, audits, repairs."""
