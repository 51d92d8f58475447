"""Tags whose events are rows in Cassandra."""
