"""The process that Spark forks its Python workers from, with everything a task needs loaded before the first record
comes.

A worker of Spark's own daemon loads all of it after it was forked, a second of one core each. What is loaded here is
also set aside from garbage collection, which Spark asks for after every task (9 ms each without this).
"""

from __future__ import annotations

import gc

import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import tailrace.views.grep.scan  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    manager()
