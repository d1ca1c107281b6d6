"""How a command of the zoo ends: a message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from core.errors import ZooError


def run_command(command: click.Command, name: str, arguments: Sequence[str] | None, *, interrupted: str) -> None:
    """Run `command` as `name` and end the process. interrupted: what is said when the user ends it."""
    try:
        code = command.main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(interrupted, err=True)
        code = 1
    except BrokenPipeError:
        # the reader (`| head`) has seen enough; there is nobody to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except ZooError as error:
        click.echo(str(error), err=True)
        code = error.exit_code
    sys.exit(code if isinstance(code, int) else 0)
