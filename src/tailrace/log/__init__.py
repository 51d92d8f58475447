"""The log that all views share: events in order, stored in runs and segments, with cursors, a hub and feeds."""
