"""Real servers for tests: Kafka, Valkey, Redis, Cassandra and Spark, started once for all processes of a test run.

With pytest, ``pytest_plugins = ["tailrace.testing.fixtures"]`` in a ``conftest.py`` is enough; see ``fixtures``.
"""
