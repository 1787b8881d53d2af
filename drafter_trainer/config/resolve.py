"""Where each setting's value comes from: flag > environment > file > default.

Owns the reading of the three layers, the record of which one won, and the translation of every mistake into one line
that names field, value and fix. It decides nothing about the values themselves (`schema` does).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import CliSettingsSource, EnvSettingsSource, SettingsError

from drafter_trainer.config.schema import ENV_PREFIX, Section, TrainerConfig
from drafter_trainer.errors import UserError

__all__ = ["ResolvedConfig", "resolve_config", "setting_lines"]

DEFAULT_LAYER = "default"
# By the type of pydantic's error, with its context filled in.
_REMEDIES = {
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "dict_type": "key=value,key=value or JSON",
    "literal_error": "{expected}",
}


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings in force, and which layer each of them comes from."""

    config: TrainerConfig
    layers: Mapping[str, str]
    """Dotted name to "flag", "env" or the file's name; names that are missing have their default."""

    def as_yaml(self) -> str:
        """All settings as a config file, each with its layer as a comment."""
        values = self.config.model_dump(mode="json")
        lines: list[str] = []
        for section, fields in values.items():
            lines.append(f"{section}:")
            for name, value in fields.items():
                layer = self.layers.get(f"{section}.{name}", DEFAULT_LAYER)
                lines.append(f"  {f'{name}: {_yaml_scalar(value)}':<50}  # {layer}")
        return "\n".join(lines) + "\n"


def resolve_config(
    *, file: Path | None = None, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Reads all layers and checks the result.

    Args:
        file: YAML with only what differs from the defaults.
        flags: The command line's dotted flags, `--section.name value` or `--section.name=value`.
        environ: Stands in for the process's environment, where `TRIBUTARY_TRAINER__SECTION__NAME` counts.

    Raises:
        UserError: A file that can't be read, an unknown name, a wrong value, settings that contradict each other.
    """
    layers = [
        (str(file), _read_file(file) if file else {}),
        ("env", _read_environ(os.environ if environ is None else environ)),
        ("flag", _read_flags(flags)),
    ]
    merged: dict[str, Any] = {}
    winners: dict[str, str] = {}
    for layer, values in layers:
        for section, fields in values.items():
            if not isinstance(fields, dict):
                raise UserError(section, fields, _section_fix(section))
            for name, value in fields.items():
                merged.setdefault(section, {})[name] = value
                winners[f"{section}.{name}"] = layer
    try:
        return ResolvedConfig(TrainerConfig(**merged), winners)
    except ValidationError as error:
        raise _user_error(error, winners) from error


def setting_lines() -> Iterator[tuple[str, str]]:
    """Every setting as (dotted flag, meaning with its default), for --help."""
    for name, info in _all_fields().items():
        yield f"--{name}", f"{info.description} [{_default_text(info)}]"


def _all_fields() -> dict[str, FieldInfo]:
    return {
        f"{section}.{name}": field
        for section, info in TrainerConfig.model_fields.items()
        for name, field in _section_type(info).model_fields.items()
    }


def _section_type(info: FieldInfo) -> type[Section]:
    section_type = info.annotation
    assert isinstance(section_type, type)
    assert issubclass(section_type, Section)
    return section_type


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UserError("--config", file, f"{error.strerror}; give a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError("--config", file, f"not valid YAML: {_yaml_problem(error)}") from error
    if not isinstance(values or {}, dict):
        raise UserError("--config", file, f"holds a {type(values).__name__}; give sections such as 'optim:'")
    return {str(section): {} if fields is None else fields for section, fields in (values or {}).items()}


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    """The source drops names of unknown sections without a word, so those are looked for here."""
    for key in environ:
        if not key.upper().startswith(ENV_PREFIX):
            continue
        section, _, name = key[len(ENV_PREFIX) :].lower().partition("__")
        if f"{section}.{name}" not in _all_fields():
            raise UserError(key, environ[key], _unknown_fix(f"{section}.{name}"))
    source = EnvSettingsSource(TrainerConfig)
    source.env_vars = {key.lower(): value for key, value in environ.items()}
    return source()


def _read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """The parser knows only exact names: argparse would guess abbreviations, and lists unknown ones without a hint."""
    known = _all_fields()
    for flag, following in zip_longest(flags, flags[1:]):
        name, _, value = flag.partition("=")
        if name.startswith("--") and name[2:] not in known:
            raise UserError(name, value or following, _unknown_fix(name[2:], prefix="--"))
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            TrainerConfig,
            cli_prog_name="drafter-trainer",
            cli_parse_args=list(flags),
            cli_exit_on_error=False,
            cli_avoid_json=True,
        )
    except SettingsError as error:
        raise _flag_error(str(error), flags) from error
    return source()


def _flag_error(message: str, flags: Sequence[str]) -> UserError:
    reason = message.removeprefix("error parsing CLI: ")
    if "expected one argument" in reason:
        return UserError(reason.removeprefix("argument ").partition(":")[0], None, "needs a value after it")
    stray = reason.removeprefix("unrecognized arguments: ")
    return UserError("command line", stray or " ".join(flags), "not understood; give settings as --section.name value")


def _user_error(error: ValidationError, winners: Mapping[str, str]) -> UserError:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return UserError(name, first["input"], _unknown_fix(name))
    layer = winners.get(".".join(name.split(".")[:2]), DEFAULT_LAYER)
    return UserError(name, first["input"], f"{_remedy(first)} (from {layer})")


def _remedy(error: ErrorDetails) -> str:
    """What to give instead of a value that pydantic has refused."""
    template = _REMEDIES.get(error["type"])
    if template is None:
        return error["msg"].removeprefix("Value error, ").replace("Input should", "should")
    facts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in error.get("ctx", {}).items()}
    return f"give {template.format(**facts)}".replace("'", "")


def _yaml_problem(error: yaml.YAMLError | UnicodeDecodeError) -> str:
    """Where and what, without the lines that the parser shows around it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _unknown_fix(name: str, *, prefix: str = "") -> str:
    """What to say about a name that isn't a setting."""
    known = list(_all_fields())
    section = name.partition(".")[0]
    if name in TrainerConfig.model_fields:
        return f"a section, not a setting; {_section_fix(section)}"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7) or [
        candidate for candidate in known if candidate.partition(".")[2] == name.rpartition(".")[2]
    ]
    if close:
        return f"no such setting; did you mean {prefix}{close[0]}?"
    if section in TrainerConfig.model_fields:
        return f"no such setting; {_section_fix(section)}"
    return f"no such setting; sections are {', '.join(TrainerConfig.model_fields)}"


def _section_fix(section: str) -> str:
    if section not in TrainerConfig.model_fields:
        return _unknown_fix(section)
    fields = _section_type(TrainerConfig.model_fields[section]).model_fields
    return f"{section} holds {', '.join(fields)}"


def _default_text(info: FieldInfo) -> str:
    value = info.default
    choices = [choice for choice in get_args(info.annotation) if isinstance(choice, str)]
    default = "none" if value is None or value in ((), {}) else _yaml_scalar(_plain(value))
    return f"{'|'.join(choices)}; default {default}" if choices else f"default {default}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _yaml_scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31)
    return text.removesuffix("\n").removesuffix("\n...")
