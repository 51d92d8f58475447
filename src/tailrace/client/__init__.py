"""What Python programs call: a ``River`` over one connection, and feeds that outlive disconnects."""
