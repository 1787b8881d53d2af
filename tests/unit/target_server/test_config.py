"""Settings: layers, their order, and one-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from target_server.__main__ import main
from target_server.command_line import parse_command_line
from target_server.config import ServerConfig
from target_server.config_layers import load_config, resolved_lines
from target_server.errors import UserError
from target_server.front import check_network, check_socket_dir
from target_server.supervisor import thread_count

REPOSITORY = Path(__file__).parents[3]


def load(*flags: str) -> tuple[ServerConfig, dict[str, str]]:
    return load_config(*parse_command_line(["serve", *flags]))


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("limits: {max_batch_token_count: 10, max_tap_count: 3, max_session_count: 4}\nlisten: 'h:1'\n")
    monkeypatch.setenv("TARGET_SERVER__LIMITS__MAX_TAP_COUNT", "4")
    monkeypatch.setenv("TARGET_SERVER__LIMITS__MAX_SESSION_COUNT", "5")
    config, origins = load("--config", str(file), "--limits.max_session_count", "6", "--devices", "cpu,cpu")
    assert config.limits.max_batch_token_count == 10
    assert config.limits.max_tap_count == 4
    assert config.limits.max_session_count == 6
    assert config.limits.max_outstanding_request_count == 64
    assert config.devices == ["cpu", "cpu"]
    lines = resolved_lines(config, origins)
    assert f"limits.max_batch_token_count: 10  # file {file}" in lines
    assert "limits.max_tap_count: 4  # environment" in lines
    assert "limits.max_session_count: 6  # flag" in lines
    assert "limits.max_outstanding_request_count: 64  # default" in lines


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.dtype", "int8"], "model.dtype: int8: "),
        (["--modle.path", "x"], "--modle.path: x: no such option; did you mean --model.path?"),
        (["--model.p=x"], "--model.p: x: no such option; did you mean --model.path?"),
        (["--dtype", "x"], "--dtype: x: no such option; did you mean --model.dtype?"),
        (["--portfile", "x"], "--portfile: x: no such option; did you mean --port-file?"),
        (["--unheard-of", "x"], "--unheard-of: x: no such option; see target-server serve --help"),
        (["--listen"], "--listen: (not set): give a value after it"),
        (["x"], "command line: x: not understood; give settings as --name value"),
        (["--limits.max_batch_token_count", "0"], "limits.max_batch_token_count: 0: give a number of at least 1"),
        (["--limits.max_batch_token_count", "x"], "limits.max_batch_token_count: x: give a whole number"),
        (["--deadlines.open_timeout_s", "0"], "deadlines.open_timeout_s: 0: give a number above 0"),
        (["--buffers.copy_audit", "no"], "buffers.copy_audit: no: give off, sampled or always"),
        (["--listen", "nowhere"], "listen: nowhere: give HOST:PORT"),
        (["--metrics.listen", "9090"], "metrics.listen: 9090: give HOST:PORT"),
        (["--devices", "cpu,tpu"], "devices: tpu: give cpu or cuda:N"),
        (["--devices", "cpu,cpu,cpu", "--replica.devices_per_replica", "2"], "replica.devices_per_replica: 2: "),
        (["--devices", "cpu,cpu", "--replica.devices_per_replica", "2"], "devices: cpu: "),
        (["--buffers.host_slot_count", "8"], "buffers.host_slot_count: 8: "),
        (["--replica.socket_dir", "/tmp", "--replica.port_base", "9000"], "replica.socket_dir: /tmp: "),
        (["--config", "/none.yaml"], "--config: /none.yaml: "),
        (["--model.path", "/none"], "model.path: /none: no such directory"),
        ([], "model.path: -: not given"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"target-server: {message}"), error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "serve|swap|status: (not set): needed here; see target-server --help"),
        (["sevre"], "serve|swap|status: invalid choice: 'sevre'"),
        (["status"], "HOST:PORT: (not set): needed here; see target-server status --help"),
        (["status", "h:1", "--jsn"], "--jsn: -: no such option; did you mean --json?"),
        (["status", "h:1", "h:2"], "command line: h:2: not understood; see target-server status --help"),
        (["status", "h:1", "--timeout", "x"], "--timeout: invalid float value: 'x': not understood"),
        (["status", "127.0.0.1:1"], "address: 127.0.0.1:1: connection refused; is the server running?"),
        (
            ["swap", "--address", "127.0.0.1:1", "--checkpoint", "x"],
            "--address: 127.0.0.1:1: connection refused; is the server running?",
        ),
    ],
)
def test_mistake_in_any_verb_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"target-server: {message}"), error
    assert error.count("\n") == 1


def test_help_of_serve_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "  --listen\n      HOST:PORT of the front; replicas listen on the same host." in text
    assert "[auto|bfloat16|float16|float32; default auto]" in text
    assert "--limits.max_batch_token_count\n" in text


def test_yaml_that_can_not_be_read_is_told_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("limits:\n  max_tap_count: 3\n max_session_count: 4\n")
    with pytest.raises(UserError) as refused:
        load("--config", str(file))
    assert refused.value.fix == (
        "is not YAML: line 3, column 2: expected <block end>, but found '<block mapping start>'"
    )


def test_unknown_key_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("limits: {max_tokens: 10}\n")
    with pytest.raises(UserError) as refused:
        load("--config", str(file))
    assert (refused.value.field, refused.value.value) == ("limits.max_tokens", "10")


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs/server").glob("*.yaml")), ids=lambda file: file.name)
def test_every_shipped_config_loads(file: Path) -> None:
    load("--config", str(file))


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "10.0.0.7", "server.example"])
def test_nobody_listens_off_loopback_by_accident(host: str) -> None:  # I9
    with pytest.raises(UserError, match="--trusted_network true"):
        check_network(load(f"--listen={host}:50051")[0])
    check_network(load(f"--listen={host}:50051", "--trusted_network", "true")[0])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "[::1]", "localhost"])
def test_loopback_needs_no_word_of_trust(host: str) -> None:  # I9
    check_network(load(f"--listen={host}:50051")[0])


def test_replicas_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(8)))
    assert thread_count(load("--devices", "cpu,cpu")[0]) == 4
    assert thread_count(load("--devices", "cuda:0,cuda:1")[0]) == 1
    assert thread_count(load("--replica.num_threads", "3")[0]) == 3


def test_front_imports_no_torch() -> None:
    code = "import sys, target_server.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("program", [["target_server", "serve"], ["drafter_trainer", "train"]], ids=lambda p: p[0])
def test_reader_of_the_output_may_leave_early(program: list[str]) -> None:
    """`… --print-config | head -1` ends without a traceback, whether or not the output fits the pipe."""
    command = [sys.executable, "-m", *program, "--print-config"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


@pytest.mark.parametrize(("name", "made", "reason"), [("none", False, "no directory"), ("x" * 120, True, "too long")])
def test_socket_directory_is_checked_before_a_start(name: str, made: bool, reason: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    if made:
        directory.mkdir()
    config, _ = load("--replica.socket_dir", str(directory))
    with pytest.raises(UserError) as refused:
        check_socket_dir(config)
    assert refused.value.field == "replica.socket_dir"
    assert reason in refused.value.fix
