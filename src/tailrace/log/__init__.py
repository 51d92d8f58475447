"""The log: events in order, in runs and segments; its cursors, store, hub and feed, which all views share."""
