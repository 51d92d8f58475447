"""The Spark application: one pass over Kafka for all views, its watermark, its publisher and its report."""
