"""Many standing queries, one document: which of them match?

needs      what a document must have for a query to be worth asking
index      queries by what they need, in a tree
ranges     … by bounds of a value
texts      … by a text in a string
filterset  the set: equal queries once, candidates from the index, each verified
sieve      one query, asked of values that are not decoded yet
"""

from tailrace.query.filterset import FilterSet

__all__ = ["FilterSet"]
