"""Telemetry sessions: samples of many channels, recorded, served live, and read again."""

from __future__ import annotations

from tailrace.view import View


class SessionsView(View):
    """The view of telemetry sessions."""

    name = "sessions"


VIEW = SessionsView()
