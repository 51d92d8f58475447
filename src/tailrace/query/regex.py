"""Regular expressions in queries: RE2's, which take time in proportion to the text and to nothing else.

They differ from MongoDB's PCRE: no look-around, back-references, atomic groups or possessive quantifiers (refused when
compiled); ``$`` is the very end of the text unless option ``m`` is given, never before a last line break; and a few
classes differ. ``docs/query.md`` lists it all.

A *literal* of a pattern is a text that every match contains: a string without it need not be searched.
"""

from __future__ import annotations

import re
from typing import Any

import re2

from tailrace.errors import QueryError
from tailrace.query.path import One

OPTIONS = "imsux"
"""Letters of ``$options``; ``u`` is taken and changes nothing."""

_QUANTIFIERS = "*+?{"
_TIMES = re.compile(r"\{\d+(,\d*)?\}", re.ASCII)
_SPECIAL = "\\.^$|()[]{}*+?"
_BUDGET = 1 << 20
"""Bytes of memory for one pattern's automaton; what does not fit is searched without one, more slowly."""


def compiled(pattern: str, options: str) -> Any:
    """Return RE2's program for a pattern, or refuse the pattern."""
    settings = re2.Options()
    settings.log_errors = False  # what users write is not for our log
    settings.never_capture = True
    settings.max_mem = _BUDGET
    text = plain(pattern) if "x" in options else pattern
    flags = "".join(letter for letter in "ims" if letter in options)
    try:
        return re2.compile((f"(?{flags}){text}" if flags else text).encode(), settings)
    except UnicodeEncodeError:
        raise QueryError("is no text that can be encoded (a lone surrogate)") from None
    except re2.error as error:
        reason = error.args[0] if error.args else "not understood"
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise QueryError(f"is no regular expression for RE2: {reason}") from None


def searcher(pattern: str, options: str) -> One:
    """Return a function that tells whether an element is a string in which the pattern is found."""
    search = compiled(pattern, options).search
    wanted = literal(pattern, options)
    if wanted is None:
        return lambda value: value.__class__ is str and search(_bytes(value)) is not None
    if wanted == pattern:
        return lambda value: value.__class__ is str and wanted in value
    return lambda value: value.__class__ is str and wanted in value and search(_bytes(value)) is not None


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return text.encode(errors="surrogatepass")


def literal(pattern: str, options: str) -> str | None:
    """Return the longest text that is found to be in every match, or None.

    It errs on the side of None: alternatives, groups and classes are passed over, unusual syntax gives up.
    """
    if "i" in options or "(?" in pattern.replace("(?:", "").replace("(?P<", ""):
        return None
    text = plain(pattern) if "x" in options else pattern
    runs, run, at = [""], "", 0
    while at < len(text):
        letter, width = text[at], 1
        if letter == "\\":
            letter, width = text[at + 1 : at + 2], 2
            if letter.isalnum() and letter not in "dDsSwWbBAznrtfv":
                return None  # \\x41, \\pL, \\Q…: their extent is not worth knowing
            fixed = not letter.isalnum()
        elif letter == "[":
            width, fixed = _class(text, at), False
        elif letter == "(":
            width, fixed = _group(text, at), False
        elif letter == "|":
            return None
        else:
            fixed = letter not in _SPECIAL
        if not width:
            return None
        at += width
        follows = text[at : at + 1]
        if follows and follows in _QUANTIFIERS:
            # Once or more keeps the letter, but what comes next need not stand beside it.
            runs.append(run + letter if fixed and follows == "+" else run)
            run = ""
            while at < len(text) and text[at] in "*+?":
                at += 1
            if text[at : at + 1] == "{":
                times = _TIMES.match(text, at)
                if times is None:
                    return None  # a brace like any other letter
                at = times.end()
                while at < len(text) and text[at] in "*+?":
                    at += 1
        elif fixed:
            run += letter
        else:
            runs.append(run)
            run = ""
    return max(*runs, run, key=len) or None


def _class(text: str, at: int) -> int:
    """Return the length of the class of characters that begins here; 0 if its end is not found."""
    end = at + 1
    if text[end : end + 1] == "^":
        end += 1
    if text[end : end + 1] == "]":
        end += 1
    while end < len(text) and text[end] != "]":
        if text.startswith("[:", end):
            close = text.find(":]", end + 2)
            end = close + 1 if close > 0 else end
        end += 2 if text[end : end + 1] == "\\" else 1
    return end + 1 - at if end < len(text) else 0


def _group(text: str, at: int) -> int:
    """Return the length of the group that begins here; 0 if its end is not found."""
    end, depth = at, 0
    while end < len(text):
        if text[end] == "\\":
            if text[end + 1 : end + 2] == "Q":
                return 0
            end += 2
            continue
        if text[end] == "[":
            width = _class(text, end)
            if not width:
                return 0
            end += width
            continue
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
        if not depth:
            return end - at
    return 0


def plain(pattern: str) -> str:
    """Return a pattern of option ``x`` without the blanks and comments that it may have."""
    kept, at = [], 0
    while at < len(pattern):
        letter = pattern[at]
        width = 1
        if pattern.startswith("\\Q", at):
            end = pattern.find("\\E", at)
            width = (end + 2 if end >= 0 else len(pattern)) - at
        elif letter == "\\":
            width = 2
        elif letter == "[":
            width = _class(pattern, at) or len(pattern)
        elif letter == "#":
            end = pattern.find("\n", at)
            at = len(pattern) if end < 0 else end + 1
            continue
        elif letter in " \t\n\r\f\v":
            at += 1
            continue
        kept.append(pattern[at : at + width])
        at += width
    return "".join(kept)
