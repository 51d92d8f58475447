"""Many standing queries, one document: which of them match?

cover    what a document must have for a query to be worth asking
index    queries by what they need: values, ranges, texts, fields
filters  the set: equal queries once, candidates from the index, each verified
"""

from tailrace.model.filters.filters import FilterSet

__all__ = ["FilterSet"]
