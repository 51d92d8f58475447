"""Others that do the same work: each is a program that reads a topic once, and prints one line of figures.

Those that are no packages of ours run in an environment of their own (``requirements/peers.txt``). Each file says what
its peer cannot do. For those that fold: accounts are the keys of the records, and the time of an event is its Kafka
timestamp. Each peer is one process.
"""
