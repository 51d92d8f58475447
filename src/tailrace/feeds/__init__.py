"""What can be followed: resumable async iterators over the stores. No HTTP, no Spark."""
