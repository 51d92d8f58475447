"""Folds: one event when a burst has settled."""
