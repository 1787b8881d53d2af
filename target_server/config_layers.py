"""Where each setting's value comes from, and one line for every mistake.

Precedence: flag > environment (`TARGET_SERVER__MODEL__PATH=...`) > YAML file > default. This is the only module of the
room that reads the environment. It must stay importable without torch: the front uses it.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import CliSettingsSource, EnvSettingsSource, SettingsError

from target_server.config import Section, ServerConfig
from target_server.errors import UserError

__all__ = ["ENV_PREFIX", "load_config", "resolved_lines", "setting_lines", "setting_names"]

ENV_PREFIX = "TARGET_SERVER__"
_SEE_HELP = "see target-server serve --help"
# What to give instead, by the type of pydantic's error, with its context filled in.
_REMEDIES = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "list_type": "a list, such as a,b",
}


def setting_names() -> list[str]:
    """Returns the dotted name of every setting."""
    return list(_fields())


def setting_lines() -> Iterator[tuple[str, str]]:
    """Yields every setting as (dotted name, meaning with its default)."""
    for name, info in _fields().items():
        choices = "|".join(choice for choice in get_args(info.annotation) if isinstance(choice, str))
        default = "none" if info.default is None else _as_yaml(info.default)
        yield name, f"{info.description} [{choices + '; ' if choices else ''}default {default}]"


def _fields() -> dict[str, FieldInfo]:
    found = {}
    for name, info in ServerConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            found.update({f"{name}.{inner}": field for inner, field in info.annotation.model_fields.items()})
        else:
            found[name] = info
    return found


def load_config(arguments: argparse.Namespace, flags: Sequence[str]) -> tuple[ServerConfig, dict[str, str]]:
    """Merges the layers and checks the result.

    Args:
        arguments: with the file as `config`, or None there.
        flags: `--name value` or `--name=value` of settings, as they were typed.

    Returns:
        The settings, and for each dotted name that is not a default the layer it came from.

    Raises:
        UserError: an unknown key, or a value outside of its range.
    """
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if arguments.config is not None:
        layers.append((f"file {arguments.config}", _read_yaml(arguments.config)))
    environment = EnvSettingsSource(ServerConfig, env_prefix=ENV_PREFIX, env_nested_delimiter="__")
    layers.append(("environment", environment()))
    layers.append(("flag", _read_flags(flags)))
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, values in layers:
        _merge(merged, values, prefix="", layer=name, origins=origins)
    try:
        return ServerConfig(**merged), origins
    except ValidationError as error:
        raise _user_error(error) from error


def _read_flags(flags: Sequence[str]) -> Mapping[str, Any]:
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            ServerConfig, cli_prog_name="target-server", cli_parse_args=list(flags), cli_exit_on_error=False
        )
    except SettingsError as error:
        reason = str(error).removeprefix("error parsing CLI: ").removeprefix("argument ")
        name, _, wrong = reason.partition(": ")
        if "expected one argument" in wrong:
            raise UserError(name, "(not set)", "give a value after it") from error
        raise UserError("command line", " ".join(flags), "not understood; give settings as --name value") from error
    return source()


def resolved_lines(config: ServerConfig, origins: Mapping[str, str]) -> list[str]:
    """Returns one `name: value  # layer` line per setting for `--print-config`."""
    lines = []
    for name, value in _flatten(config.model_dump(mode="json"), ""):
        lines.append(f"{name}: {_as_yaml(value)}  # {origins.get(name, 'default')}")
    return lines


def _as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, default_flow_style=True, width=2**31).splitlines()[0])


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("--config", path, f"can't be read ({error.strerror}); give a YAML file") from error
    except yaml.YAMLError as error:
        raise UserError("--config", path, f"is not YAML: {_yaml_problem(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError("--config", path, "must hold settings by name at its top level")
    return values


def _yaml_problem(error: yaml.YAMLError) -> str:
    """Returns where and what, without the lines that the parser shows around it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _merge(
    into: dict[str, Any], values: Mapping[str, Any], *, prefix: str, layer: str, origins: dict[str, str]
) -> None:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            nested = into.setdefault(key, {})
            if isinstance(nested, dict):
                _merge(nested, value, prefix=f"{name}.", layer=layer, origins=origins)
                continue
        into[key] = value
        origins[name] = layer


def _flatten(values: Mapping[str, Any], prefix: str) -> Sequence[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.extend(_flatten(value, f"{prefix}{key}."))
        else:
            flat.append((f"{prefix}{key}", value))
    return flat


def _user_error(error: ValidationError) -> UserError:
    """Turns the first of pydantic's errors into field, value and fix."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, setting_names(), n=1, cutoff=0.7)
        return UserError(
            name, first["input"], f"no such setting; {f'did you mean {close[0]}?' if close else _SEE_HELP}"
        )
    message = first["msg"].removeprefix("Value error, ")
    if not name:
        # A rule across fields names its field itself.
        field, value, fix = message.split(": ", 2)
        return UserError(field, value, fix)
    template = _REMEDIES.get(first["type"])
    if template is None:
        return UserError(name, first["input"], message[0].lower() + message[1:])
    facts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in first.get("ctx", {}).items()}
    return UserError(name, first["input"], f"give {template.format(**facts)}".replace("'", ""))
