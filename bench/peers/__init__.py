"""Others that fold: each is a program that reads a topic once, writes folds to another, and prints one line of figures.

They run in an environment of their own (``requirements/peers.txt``), except the seed's algorithm, which needs nothing
new, and ours. What is the same for all: accounts are the keys of the records, and the time of an event is its Kafka
timestamp. Each peer is one process.
"""
