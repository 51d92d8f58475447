"""Kafka outside of Spark: the broker's metadata, reading ranges of records, writing events."""
