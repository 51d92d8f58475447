"""The RTA telemetry protocol: its messages, which ``make protos`` makes of the ``.proto`` files, and its viewers."""
