"""Searches: what matches a query, from the past and then live."""
