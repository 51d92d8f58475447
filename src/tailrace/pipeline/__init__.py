"""What happens to events: the write side, one Spark query for all views. Never imports the web framework."""
