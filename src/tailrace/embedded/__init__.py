"""What makes one machine enough: a real Kafka broker, a real Valkey and the supervisor that keeps them running."""
