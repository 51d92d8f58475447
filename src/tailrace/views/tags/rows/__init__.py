"""Tags whose events rest as rows in Cassandra."""
