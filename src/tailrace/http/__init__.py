"""The service: HTTP, event streams, WebSockets, problems, health."""
