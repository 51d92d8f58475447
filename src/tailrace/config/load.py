"""Loading the settings from four layers: defaults < ``tailrace.toml`` < ``TAILRACE_<SECTION>__<KEY>`` < flags.

The later layer wins, and each value knows its origin. An unknown key is refused with its path, all problems are
reported at once, and no secret is ever printed.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError
from pydantic_settings import EnvSettingsSource

from tailrace.config.settings import PATHS, PREFIX, Settings, suggest, variable
from tailrace.config.values import HIDDEN, without_password
from tailrace.errors import ConfigError
from tailrace.views.folds.settings import REFUSED, FoldSettings

FILE_NAME = "tailrace.toml"
REFERENCE = Path(__file__).with_name("reference.toml")
NOT_SETTINGS = frozenset({"TAILRACE_CONFIG", "TAILRACE_URL"})
"""Variables that are not settings: the path of the file, and the URL of the service for the command line."""

Layer = tuple[dict[str, Any], Callable[[str], str]]
"""Values of one layer as nested tables, and a function that names the origin of a dotted path."""


def load(file: Path | None = None, flags: Mapping[str, object] | None = None) -> Settings:
    """Read all layers and check them.

    Args:
        file: the configuration file; else ``TAILRACE_CONFIG``, else ``tailrace.toml`` here or in a parent folder.
        flags: values of the command line by dotted path; ``None`` means not given.

    Raises:
        ConfigError: with every problem, one per line: path, origin, value and what is wanted.
    """
    problems: list[str] = []
    layers = [*_file_layer(file), _environment_layer(problems), _flag_layer(flags or {})]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for table, origin_of in layers:
        for section, keys in table.items():
            if not isinstance(keys, dict):
                problems.append(_unknown(section, origin_of(section)))
                continue
            for key, value in keys.items():
                merged.setdefault(section, {})[key] = value
                origins[f"{section}.{key}"] = origin_of(f"{section}.{key}")
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        problems += [_problem(dict(each), merged, origins) for each in error.errors(include_url=False)]
    if problems:
        raise ConfigError(
            "the configuration cannot be used:\n" + "\n".join(f"  {problem}" for problem in dict.fromkeys(problems))
        )
    if "valkey.url" in origins and "valkey.password" not in origins and settings.valkey.password.get_secret_value():
        origins["valkey.password"] = origins["valkey.url"]
    settings._origins.update(origins)
    return settings


def _file_layer(file: Path | None) -> list[Layer]:
    path = file or (Path(os.environ["TAILRACE_CONFIG"]) if os.environ.get("TAILRACE_CONFIG") else None)
    if path is None:
        here = Path.cwd()
        path = next((file for folder in (here, *here.parents) if (file := folder / FILE_NAME).is_file()), None)
        if path is None:
            return []
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    origin = f"file {path.absolute()}"
    return [(table, lambda _: origin)]


class _Variables(EnvSettingsSource):
    """Reads variables: lists and tables are JSON, any other text stays text, so that a pattern needs no quotes."""

    def decode_complex_value(self, field_name: str, field: Any, value: Any) -> Any:
        try:
            decoded = json.loads(value)
        except ValueError:
            return value
        return decoded if isinstance(decoded, list | dict) else value


def _environment_layer(problems: list[str]) -> Layer:
    names = {variable(path) for path in PATHS}
    unknown = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in names | NOT_SETTINGS]
    others = {other.removeprefix(PREFIX) for other in names | NOT_SETTINGS}
    for name in unknown:
        close = suggest(name.removeprefix(PREFIX), others).replace("mean ", f"mean {PREFIX}")
        problems.append(f"{name} (env): no setting has this variable{close}")
    variables = _Variables(Settings)
    variables.env_vars = {name.lower(): value for name, value in os.environ.items() if name in names}
    return variables(), lambda path: f"env {variable(path)}"


def _flag_layer(flags: Mapping[str, object]) -> Layer:
    table: dict[str, Any] = {}
    for path, value in flags.items():
        if value is not None:
            section, _, key = path.partition(".")
            table.setdefault(section, {})[key] = value
    return table, lambda path: f"flag --{path.rpartition('.')[2].replace('_', '-')}"


def _problem(error: dict[str, Any], merged: dict[str, Any], origins: dict[str, str]) -> str:
    kind, (section, *keys) = error["type"], (str(part) for part in error["loc"])
    path: list[str] = []
    value: Any = merged
    for part in (section, *keys):
        if not isinstance(value, Mapping) or part not in value:
            break
        path.append(part)
        value = value[part]
    key = ".".join([section, *keys[:1]])
    origin = origins.get(key) or ", ".join(sorted({o for p, o in origins.items() if p.startswith(f"{section}.")}))
    if kind == "extra_forbidden":
        return _unknown(".".join(path), origin)
    if kind == "missing":
        return f"{'.'.join([section, *keys])} ({origin}): not given, and there is no default"
    wanted = wanted_by(error)
    if kind == REFUSED:
        path, value = [section, *keys], error["input"]
    elif keys[-1:] == ["[key]"]:
        value = path[-1]
    if len(path) < 2:
        return f"{section} ({origin}): wanted {wanted}"
    return f"{'.'.join(path)} ({origin}): got {_hidden(key, value)}, wanted {wanted}"


def wanted_by(error: Mapping[str, Any]) -> str:
    """Return the description of the accepted values from a validation error."""
    if error["type"] in ("dict_type", "model_type"):
        return "a table"
    return str(error.get("ctx", {}).get("error") or error["msg"]).removeprefix("Input should be ")


def _unknown(path: str, origin: str) -> str:
    if path.startswith("folds.rules."):
        close = suggest(path.rpartition(".")[2], FoldSettings.model_fields)
    else:
        close = suggest(path, PATHS if "." in path else tuple(Settings.model_fields))
    return f"{path} ({origin}): no such setting{close}"


def _hidden(path: str, value: object) -> str:
    if path == "valkey.password" or isinstance(value, SecretStr):
        return HIDDEN
    if path == "valkey.url":
        return repr(without_password(str(value))[0])
    if path in ("kafka.properties", "spark.conf"):
        return "a table" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    return repr(value)
