"""The process that Spark forks its Python workers from: it loads what tasks need before the first record comes.

A worker of Spark's own daemon loads all of it after the fork, one second of one core each. What is loaded here is also
excluded from garbage collection, which Spark requests after every task (9 ms each without this).
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

from tailrace.views import VIEWS

if __name__ == "__main__":
    for view in VIEWS:
        for module in ("write", "driver"):
            with suppress(ModuleNotFoundError):
                import_module(f"{type(view).__module__}.{module}")
    gc.collect()
    gc.freeze()
    manager()
