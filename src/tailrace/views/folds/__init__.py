"""Folds: one event when a burst has settled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tailrace.view import FolderView

if TYPE_CHECKING:
    from tailrace.config.settings import Settings
    from tailrace.driver.hooks import Start
    from tailrace.views.folds.driver import FoldsDriver
    from tailrace.views.folds.write import FoldsPlan


class FoldsView(FolderView):
    name = "folds"

    def plan(self, settings: Settings) -> FoldsPlan:
        from tailrace.views.folds.write import FoldsPlan

        return FoldsPlan.of(settings)

    def driver(self, settings: Settings) -> FoldsDriver:
        from tailrace.views.folds.driver import FoldsDriver

        return FoldsDriver(self.plan(settings))

    def retire(self, start: Start) -> None:
        """Emit what rules held that are gone, when no rule is left."""
        if not start.settings.folds.rules:
            from tailrace.views.folds.driver import enforce

            enforce(start.shards, {}, round(time.time() * 1000))

    def outputs(self, settings: Settings) -> dict[str, int]:
        from tailrace.views.folds.store import rules_of

        rules = rules_of(settings).values()
        raw = {rule.raw: settings.kafka.new_topic_partitions for rule in rules if rule.raw}
        return raw | {rule.output: 1 for rule in rules}


VIEW = FoldsView()
