"""drafter-trainer: one command, six verbs.

Owns the exit code: 0 done, 2 a mistake in what the user gave (one line on stderr), 1 anything else. Each verb lies in a
module of its own and is imported when it's asked for, so that help and mistakes don't wait for torch.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

# Threads that wait must sleep, not take the core that the target or another rank needs. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from drafter_trainer.cli.parser import Verb, build_parser
from drafter_trainer.errors import EXIT_FAILED, EXIT_USER_ERROR, TrainerError, UserError
from drafter_trainer.logging_setup import setup_logging

PROGRAM = "drafter-trainer"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns the exit code."""
    setup_logging()
    try:
        options, flags = build_parser(PROGRAM).parse_known_args(argv)
        verb: Verb = options.load_verb()
        code = verb(options, flags)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except TrainerError as error:
        logging.getLogger(__name__).debug("where it happened", exc_info=True)
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone; what is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
