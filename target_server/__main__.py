"""`target-server serve | swap | status`: parses, prints, exits.

Exit codes: 0 done, 2 a mistake of the user (one line on stderr), 1 anything else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

# Replicas are started by exec: gRPC's fork handlers would only warn about its threads. Read when grpc is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from target_wire.v1 import target_pb2

from target_server.config import ArgumentParser, add_config_flags, load_config, resolved_lines
from target_server.errors import ReplicaStartError, SwapFailedError, UserError
from target_server.front import serve
from target_server.memory_plan import build_plan
from target_server.status import print_status, watch_status
from target_server.swap_command import swap_target

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        code = _run(*_parse(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"target-server: {error}", file=sys.stderr)
        return 2
    except (ReplicaStartError, SwapFailedError) as error:
        print(f"target-server: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: argparse.Namespace, flags: Any) -> int:
    if arguments.command == "serve":
        return _serve(arguments, flags)
    if arguments.command == "swap":
        return _swap(arguments)
    if arguments.watch:
        return watch_status(arguments.address, timeout_s=arguments.timeout)
    return print_status(arguments.address, as_json=arguments.json, timeout_s=arguments.timeout)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    parser = ArgumentParser(prog="target-server", description="Serves a frozen target's hidden states.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve|swap|status")
    serve = commands.add_parser("serve", help="serve a checkpoint directory")
    serve.add_argument("--port-file", type=Path, metavar="FILE", help="write the front's port there once it serves")
    serve.add_argument(
        "--print-config", action="store_true", help="print the settings and where each is from, and exit"
    )
    serve.add_argument("--dry-run", action="store_true", help="print the memory plan and refuse what can't fit")
    flags = add_config_flags(serve)
    _add_swap(commands)
    status = commands.add_parser("status", help="what a server serves and how its replicas are")
    status.add_argument("address", metavar="HOST:PORT", help="the front's address")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as one JSON object")
    form.add_argument("--watch", action="store_true", help="as a table, drawn anew every second")
    status.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for the answer (5)")
    return parser.parse_args(argv), flags


def _add_swap(commands: Any) -> None:
    swap = commands.add_parser("swap", help="serve another checkpoint of the same shape, without a restart")
    swap.add_argument("--address", required=True, metavar="HOST:PORT", help="the front's address")
    swap.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="local directory, or a path below the server's swap.checkpoint_root",
    )
    swap.add_argument("--dry-run", action="store_true", help="only check and read it; change nothing")
    swap.add_argument(
        "--wait-for-trainer", action="store_true", help="end when every open session has had a batch of the new version"
    )
    swap.add_argument("--request-id", default="", metavar="ID", help="names the swap: given again, it is joined")
    swap.add_argument("--timeout", type=float, default=7200.0, metavar="SECONDS", help="for all of it (7200)")


def _swap(arguments: argparse.Namespace) -> int:
    request = target_pb2.SwapTargetRequest(
        request_id=arguments.request_id,
        checkpoint=arguments.checkpoint,
        dry_run=arguments.dry_run,
        wait_for_trainer=arguments.wait_for_trainer,
    )
    return swap_target(request, arguments.address, timeout_s=arguments.timeout)


def _serve(arguments: argparse.Namespace, flags: Any) -> int:
    config, origins = load_config(arguments, flags)
    if arguments.print_config:
        print("\n".join(resolved_lines(config, origins)))
        return 0
    if arguments.dry_run:
        plan = build_plan(config)
        print("\n".join(plan.lines()))
        plan.check(config)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(name)s: %(message)s")
    return int(uvloop.run(serve(config, port_file=arguments.port_file)))


if __name__ == "__main__":
    sys.exit(main())
