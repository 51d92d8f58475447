"""Measurements: one file for each subject, which runs it beside its peers on the same data, in turns.

``jobs.py`` is the frame, ``meter.py`` says what a turn took, ``report.py`` and ``plot.py`` make the tables and plots of
docs/benchmarks.md, ``servers.py``, ``lane.py`` and ``pipeline.py`` run the parts, ``readers.py`` and ``events.py`` send
and receive numbered events. ``python -m bench`` runs all of it.
"""
