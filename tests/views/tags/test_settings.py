"""The settings of tags: what is refused, by name, and what the words in them mean."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.config.settings import Settings
from tailrace.config.settings import load as load_settings
from tailrace.errors import ConfigError
from tailrace.views.tags import VIEW


def load(tmp_path: Path, text: str) -> Settings:
    file = tmp_path / "tailrace.toml"
    file.write_text(text)
    return load_settings(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tags]\nbucket = "2h"', "tags.bucket"),
        ('[tags]\nstore = "redis"', "tags.store"),
        ('[tags]\nfirst_bucket = "2026-11-16"', "yyyyMMdd"),
        ('[tags]\nfirst_bucket = "20261316"', "yyyyMMdd"),
        ('[tags]\nlong_back_track = "1s"', "longer than back_track"),
        ('[tags]\nback_track = "off"', "back_track too"),
        ('[tags.rules]\n"" = {a = 1}', "a tag of 1 to 512 bytes"),
        ('[tags.rules]\nbig = {total = {"$over" = 1}}', "a query"),
        ('[tags]\npaths = ["a..b"]', "a dotted path"),
        ('[tags]\nstore = "cassandra"\n[pipeline]\nmax_event_bytes = "9MiB"', "at most 8MiB"),
        ('[cassandra]\nkeyspace = "a-b"', "cassandra.keyspace"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_would_be(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("bucket", "first", "begins"),
    [
        ("day", "20261116T10:20", datetime(2026, 11, 16, tzinfo=UTC)),
        ("hour", "20261116T10:20", datetime(2026, 11, 16, 10, tzinfo=UTC)),
        ("minute", "20261116T10:20", datetime(2026, 11, 16, 10, 20, tzinfo=UTC)),
        ("minute", "20261116", datetime(2026, 11, 16, tzinfo=UTC)),
        ("minute", "20261116T10", datetime(2026, 11, 16, 10, tzinfo=UTC)),
    ],
)
def test_W_32_the_first_bucket_is_rounded_down(  # noqa: N802
    tmp_path: Path, bucket: str, first: str, begins: datetime
) -> None:
    tags = load(tmp_path, f'[tags]\nbucket = "{bucket}"\nfirst_bucket = "{first}"').tags
    assert tags.first_ms == round(begins.timestamp() * 1000)
    assert load(tmp_path, "").tags.first_ms == 0


def test_words_stand_for_what_is_not_a_duration(tmp_path: Path) -> None:
    text = '[tags]\ndelay = "auto"\nback_track = "off"\nlong_back_track = "off"\nlong_back_track_period = "max"'
    tags = load(tmp_path, text).tags
    assert (tags.delay, tags.back_track, tags.long_back_track, tags.long_back_track_period) == (None,) * 4
    assert load(tmp_path, '[tags]\ndelay = "50ms"').tags.delay == timedelta(milliseconds=50)
    shown = {row.path: row.value for row in load(tmp_path, text).show()}
    assert (shown["tags.delay"], shown["tags.back_track"]) == ('"auto"', '"off"')


def test_tags_are_written_only_where_there_are_paths_or_rules(tmp_path: Path) -> None:
    assert "tags" not in load(tmp_path, "").live_views
    assert "tags" in load(tmp_path, '[tags]\npaths = ["tags"]').live_views
    assert "tags" in load(tmp_path, "[tags.rules]\nbig = {total = 1}").live_views
    in_rows = load(tmp_path, '[tags]\nstore = "cassandra"\npaths = ["tags"]')
    assert (VIEW.keeps_logs(in_rows), VIEW.is_audited(in_rows)) == (False, True)
    in_logs = load(tmp_path, "")
    assert (VIEW.keeps_logs(in_logs), VIEW.is_audited(in_logs)) == (True, False)
