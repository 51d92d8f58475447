"""Everything on one machine: a real Kafka broker, Valkey and Cassandra, and the supervisor that keeps them running."""
