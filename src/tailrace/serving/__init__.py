"""How things leave: HTTP, event streams, problems, operations. Knows feeds and stores; knows no Spark."""
