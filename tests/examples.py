"""Number of random examples of a property: ``--examples=0.25`` shows each a quarter of its own number."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_share = 1.0


def use_share(share: float) -> None:
    """Show every property this part of its examples. To be called before tests are collected.

    A busy machine is no failure: no example has a deadline, and none is too slow to be made.
    """
    global _share
    _share = share
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    settings.register_profile("patient", deadline=None, suppress_health_check=checks, max_examples=scaled(100))
    settings.load_profile("patient")


def examples(number: int) -> settings:
    """Decorate a property that needs another number of examples than 100."""
    return settings(max_examples=scaled(number))


def scaled(number: int) -> int:
    """Return the part of this many examples that is wanted."""
    return max(5, round(number * _share))
