"""Tagging: which tags an event has, whose it is, and what its numbers and timeuuids are."""

from __future__ import annotations

import pytest

from tailrace.config.values import Where
from tailrace.views.tags.model import SourceProgress, TaggedEvent, Tagger, timeuuid_ms
from tailrace.views.tags.settings import TagRules, TagsSettings

PLACE = "carts:0"


@pytest.mark.parametrize(
    ("value", "tags"),
    [
        (b'{"tags":["red","blue"]}', ("red", "blue")),
        (b'{"tags":"red"}', ("red",)),
        (b'{"tags":["red","red"],"more":{"tags":["red","green"]}}', ("red", "green")),
        (b'{"tags":["r\\u00f6t"]}', ("röt",)),
        (b'{"tags":[]}', None),
        (b'{"tags":null}', None),
        (b'{"other":["red"]}', None),
        (b"[1,2]", None),
        (b'{"tags":{"red":1}}', None),
    ],
)
def test_tags_are_a_text_or_a_list_of_texts_at_the_paths(value: bytes, tags: tuple[str, ...] | None) -> None:
    found = Tagger(TagsSettings(paths=("tags", "more.tags"))).read(b"cart-1", value, 7)
    assert found == ("no-tag" if tags is None else TaggedEvent("cart-1", 7, tags, 0))


def test_what_is_no_tag_among_tags_is_ignored_and_counted() -> None:
    value = b'{"tags":["red",1,null,"","%b",["x"]]}' % (b"x" * 513)
    assert Tagger(TagsSettings(paths=("tags",))).read(b"c", value, 0) == TaggedEvent("c", 0, ("red",), 5)


def test_a_rule_gives_a_tag_to_what_its_query_matches() -> None:
    tagger = Tagger(TagsSettings(paths=("tags",), rules=TagRules({"big": Where({"total": {"$gt": 100}})})))
    assert tagger.read(b"c", b'{"total":101,"tags":["eu"]}', 0) == TaggedEvent("c", 0, ("eu", "big"), 0)
    assert tagger.read(b"c", b'{"total":101}', 0) == TaggedEvent("c", 0, ("big",), 0)
    assert tagger.read(b"c", b'{"total":99}', 0) == "no-tag"


def test_source_and_number_come_from_paths_if_they_are_given() -> None:
    tagger = Tagger(TagsSettings(source=("shop", "cart.id"), sequence="cart.n", paths=("tags",)))
    assert tagger.read(None, b'{"shop":"a/b","cart":{"id":4,"n":12},"tags":"x"}', 3) == TaggedEvent(
        "a%2Fb/=4", 12, ("x",), 0
    )
    assert tagger.read(None, b'{"shop":"a","cart":{"n":12},"tags":"x"}', 3) == "no-source"
    assert tagger.read(None, b'{"shop":"a","cart":{"id":4,"n":"12"},"tags":"x"}', 3) == "no-sequence"
    assert Tagger(TagsSettings(paths=("tags",))).read(None, b'{"tags":"x"}', 3) == "no-source"


def test_how_far_a_source_has_come_reads_back() -> None:
    assert SourceProgress.parse(None) == SourceProgress()
    for each in (SourceProgress(3, -1, 17, "a topic:4"), SourceProgress(1, 0, 0, "carts@2:0")):
        assert SourceProgress.parse(each.stored()) == each


def test_a_source_written_from_two_places_is_a_conflict() -> None:
    known = SourceProgress(3, 10, 17, "carts:0")
    assert known.conflict(11, "carts:0") == ""
    assert known.conflict(10, "carts:0") == "sequence"
    assert known.conflict(11, "carts:1") == "place"
    assert SourceProgress().conflict(0, "carts:1") == ""


def test_timeuuids_do_not_fall_back_and_not_run_ahead() -> None:
    here, there = SourceProgress(1, 1, 500, "carts:0"), SourceProgress(1, 1, 500, "carts:1")
    assert timeuuid_ms(100, 0, [], PLACE, 10_000) == 100
    assert timeuuid_ms(100, 300, [], PLACE, 10_000) == 300
    assert timeuuid_ms(20_000, 300, [], PLACE, 10_000) == 10_000
    assert timeuuid_ms(100, 300, [here], PLACE, 10_000) == 500
    assert timeuuid_ms(100, 300, [there], PLACE, 10_000) == 501
