"""What the documents tell people to type works, and what they point to exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from bench import __main__ as bench_main
from demo import __main__ as demo_main
from drafter_trainer.__main__ import main as drafter_trainer_main
from target_server.__main__ import main as target_server_main
from tests.support.cli import logging_restored

CHECKOUT = Path(__file__).resolve().parents[3]
DOCUMENTS = (
    "README.md",
    "docs/running.md",
    "docs/how-it-works.md",
    "docs/log.md",
    "bench/README.md",
    "demo/README.md",
    "demo/data/README.md",
)
PROGRAMS = {"target-server": "target_server", "drafter-trainer": "drafter_trainer"}
# In this process: a start takes more than a second.
MAINS = {"target_server": target_server_main, "drafter_trainer": drafter_trainer_main}


def _commands() -> list[list[str]]:
    """Every command of every bash block, as words, without leading VARIABLE=value; each once."""
    found: dict[str, list[str]] = {}
    for name in DOCUMENTS:
        text = (CHECKOUT / name).read_text(encoding="utf-8")
        for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    found[shlex.join(words)] = words
    return list(found.values())


COMMANDS = _commands()


def _of(program: str) -> list[list[str]]:
    return [words for words in COMMANDS if words[0] == program]


def _ids(words: list[str]) -> str:
    return " ".join(words)[:60]


@pytest.mark.parametrize("words", _of("make"), ids=_ids)
def test_make_targets_exist(words: list[str]) -> None:
    subprocess.run(["make", "--dry-run", *words[1:]], cwd=CHECKOUT, check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize("words", _of("python"), ids=_ids)
def test_demo_and_bench_commands_parse(words: list[str]) -> None:
    parsers = {"demo": demo_main._parser, "bench": bench_main._parser}
    assert words[1] == "-m"
    parsers[words[2]]().parse_args(words[3:])


def _program_commands() -> list[list[str]]:
    """Commands of both programs as `module verb flags`; torchrun's own part is left out."""
    commands = [[PROGRAMS[words[0]], *words[1:]] for words in COMMANDS if words[0] in PROGRAMS]
    return commands + [words[words.index("-m") + 1 :] for words in _of("torchrun")]


@pytest.mark.parametrize("words", _program_commands(), ids=_ids)
def test_program_commands_are_understood(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, verb, *rest = words
    if verb == "inspect":
        # It has understood its arguments when it looks for the directory.
        rest = ["no-such-run", *rest[1:]]
        expected, output = 2, "no such directory"
    elif verb == "replay":
        expected, output = 2, "is no dump"
    elif verb == "status":
        # Nobody listens on port 1: it has understood its arguments when it says so.
        rest = ["127.0.0.1:1", *rest[1:]]
        expected, output = 2, "connection refused"
    elif verb == "swap":
        assert rest[0] == "--address"
        rest[1] = "127.0.0.1:1"
        expected, output = 2, "connection refused"
    else:
        rest = [*rest, *([] if "--print-config" in rest else ["--print-config"])]
        expected, output = 0, ":"
    monkeypatch.chdir(CHECKOUT)
    with logging_restored():
        code = MAINS[module]([verb, *rest])
    printed = capsys.readouterr()
    assert code == expected, printed.err
    assert output in printed.out + printed.err


def test_every_program_verb_is_shown_somewhere() -> None:
    shown = {(words[0], words[1]) for words in _program_commands()}
    verbs = {
        "target_server": ("serve", "swap", "status"),
        "drafter_trainer": ("prepare", "train", "evaluate", "export"),
    }
    assert shown >= {(module, verb) for module, names in verbs.items() for verb in names}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = CHECKOUT / name
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", ["compose.yaml", "docker/compose.yaml", "docker/compose.gpu.yaml"])
def test_compose_files_are_yaml(name: str) -> None:
    assert yaml.safe_load((CHECKOUT / name).read_text(encoding="utf-8"))


def test_demo_readme_is_short() -> None:
    assert len((CHECKOUT / "demo/README.md").read_text(encoding="utf-8").splitlines()) <= 60
