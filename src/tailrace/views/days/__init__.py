"""Day streams: every record in the log of its key, bucket by bucket."""
