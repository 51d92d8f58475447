"""Day streams: every record in the log of its key, bucket by bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.view import View

if TYPE_CHECKING:
    import typer
    from fastapi import APIRouter

    from tailrace.config.settings import Settings
    from tailrace.http.service import Service, ViewService
    from tailrace.upkeep.copy import ViewCopy
    from tailrace.upkeep.job import BucketSettings
    from tailrace.views.days.write import DaysPlan


class DaysView(View):
    """The view of day streams."""

    name = "days"
    is_copy = True

    def plan(self, settings: Settings) -> DaysPlan:
        from tailrace.views.days.write import DaysPlan

        return DaysPlan.of(settings)

    def routes(self) -> APIRouter:
        from tailrace.views.days.routes import routes

        return routes.router

    def open(self, service: Service) -> ViewService:
        from tailrace.views.days.routes import DaysService

        return DaysService(service)

    def commands(self, app: typer.Typer) -> None:
        from tailrace.views.days.cli import add_commands

        add_commands(app)

    def buckets(self, settings: Settings) -> BucketSettings:
        return settings.days

    def copy(self, settings: Settings) -> ViewCopy:
        from tailrace.upkeep.log_copy import LogCopy

        return LogCopy(self.plan(settings), settings.days)


VIEW = DaysView()
