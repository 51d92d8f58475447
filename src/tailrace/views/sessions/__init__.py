"""Telemetry sessions: samples of many channels, recorded, served live, and read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import FolderView

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.upkeep.job import Jobs
    from tailrace.views.sessions.write import SessionPlan, SessionsDriver


class SessionsView(FolderView):
    name = "sessions"

    def plan(self, settings: Settings) -> SessionPlan:
        from tailrace.views.sessions.write import SessionPlan

        return SessionPlan.of(settings)

    def driver(self, settings: Settings) -> SessionsDriver:
        from tailrace.views.sessions.write import SessionsDriver

        return SessionsDriver(self.plan(settings))

    def jobs(self, settings: Settings) -> Jobs:
        from tailrace.views.sessions.upkeep import session_jobs

        return session_jobs(settings)


VIEW = SessionsView()
