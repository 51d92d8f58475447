"""Telemetry sessions: samples of many channels, recorded, served live, and read again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import View

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tailrace.config.settings import Settings
    from tailrace.http.service import Service, ViewService
    from tailrace.upkeep.job import Jobs
    from tailrace.views.sessions.write import SessionPlan, SessionsDriver


class SessionsView(View):
    name = "sessions"

    def plan(self, settings: Settings) -> SessionPlan:
        from tailrace.views.sessions.write import SessionPlan

        return SessionPlan.of(settings)

    def driver(self, settings: Settings) -> SessionsDriver:
        from tailrace.views.sessions.write import SessionsDriver

        return SessionsDriver(self.plan(settings))

    def routes(self) -> APIRouter:
        from fastapi import APIRouter

        from tailrace.views.sessions.routes import pages, routes, rta

        all_routes = APIRouter()
        for each in (routes, pages, rta):
            all_routes.routes.extend(each.router.routes)
        return all_routes

    def open(self, service: Service) -> ViewService:
        from tailrace.views.sessions.routes import SessionsService

        return SessionsService(service)

    def commands(self, app: typer.Typer) -> None:
        from tailrace.views.sessions.cli import add_commands

        add_commands(app)

    def jobs(self, settings: Settings) -> Jobs:
        from tailrace.views.sessions.upkeep import session_jobs

        return session_jobs(settings)


VIEW = SessionsView()
