"""The client for Python programs: a ``River`` over one connection, and feeds that outlive disconnects."""
