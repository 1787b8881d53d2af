"""`target-server serve | swap | status`: parses, prints, exits.

Exit codes: 0 done, 2 a mistake of the user (one line on stderr), 1 anything else.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

import uvloop

# Replicas are started by exec: gRPC's fork handlers would only warn about its threads. Read when grpc is imported.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
# For the replicas: threads that wait must sleep, not take the core that a trainer or another replica needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from target_wire.v1 import target_pb2

from target_server.command_line import parse_command_line
from target_server.config_layers import load_config, resolved_lines
from target_server.errors import ReplicaStartError, SwapFailedError, UserError
from target_server.front import serve
from target_server.memory_plan import build_plan
from target_server.status import print_status, watch_status
from target_server.swap_command import swap_target

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        code = _run(*parse_command_line(sys.argv[1:] if argv is None else argv))
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


def _run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    if arguments.command == "serve":
        return _serve(arguments, flags)
    if arguments.command == "swap":
        return _swap(arguments)
    if arguments.watch:
        return watch_status(arguments.address, timeout_s=arguments.timeout)
    return print_status(arguments.address, as_json=arguments.json, timeout_s=arguments.timeout)


def _swap(arguments: argparse.Namespace) -> int:
    request = target_pb2.SwapTargetRequest(
        request_id=arguments.request_id,
        checkpoint=arguments.checkpoint,
        dry_run=arguments.dry_run,
        wait_for_trainer=arguments.wait_for_trainer,
    )
    return swap_target(request, arguments.address, timeout_s=arguments.timeout)


def _serve(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    config, origins = load_config(arguments, flags)
    if arguments.print_config:
        print("\n".join(resolved_lines(config, origins)))
        return 0
    if arguments.dry_run:
        plan = build_plan(config)
        print("\n".join(plan.lines()))
        plan.check(config)
        print(plan.verdict(config))
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s front %(levelname)s %(name)s: %(message)s")
    return int(uvloop.run(serve(config, port_file=arguments.port_file)))


if __name__ == "__main__":
    sys.exit(main())
