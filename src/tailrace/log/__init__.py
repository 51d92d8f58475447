"""The log: events in order, in runs and segments, with the cursors, the store, the hub and the feed that every view reads by."""
