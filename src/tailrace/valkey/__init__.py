"""Valkey: key names, connections, marks and the functions that change a shard."""
