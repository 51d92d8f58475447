"""Kafka: which topics there are, and how records are read and written outside of Spark."""
