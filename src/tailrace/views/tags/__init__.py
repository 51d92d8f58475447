"""Tags: all events with a tag, in order and none missing."""
