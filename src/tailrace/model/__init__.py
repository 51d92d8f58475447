"""What things are: pure values and rules. Nothing here does I/O, knows Spark, or reads a clock."""
