"""Telemetry sessions: samples of many channels, recorded, served live, and read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import View

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.views.sessions.write import SessionPlan, SessionsDriver


class SessionsView(View):
    """The view of telemetry sessions."""

    name = "sessions"

    def plan(self, settings: Settings) -> SessionPlan:
        """Return what tasks must know."""
        from tailrace.views.sessions.write import SessionPlan

        return SessionPlan.of(settings)

    def driver(self, settings: Settings) -> SessionsDriver:
        """Return the hooks of one start of the driver."""
        from tailrace.views.sessions.write import SessionsDriver

        return SessionsDriver(self.plan(settings))


VIEW = SessionsView()
