"""What every stage's command line shares: the console, and the border where a NibbleError becomes a message."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from nibble.errors import NibbleError

console = Console()
USER_ERROR = 2
NO_SPACE = os.strerror(errno.ENOSPC)
INTERRUPTED = 130


def run_stage(main: Callable[[], object]) -> NoReturn:
    """Run a stage and leave: a NibbleError is printed in red without a traceback (2), Ctrl-C ends quietly (130).

    A full disk is told like a NibbleError: no stage can know beforehand, and each leaves whole files or none.
    """
    try:
        main()
    except NibbleError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] [red]{escape(str(error))}[/]", highlight=False)
        sys.exit(USER_ERROR)
    except Exception as error:
        if NO_SPACE not in str(error):  # libraries wrap the system's error in types of their own
            raise
        message = f"{error}: free some space on that disk, or move the files (NIBBLE_ENGINES, NIBBLE_RESULTS)"
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] [red]{escape(message)}[/]", highlight=False)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        Console(stderr=True).print("[yellow]interrupted[/]")
        sys.exit(INTERRUPTED)
    sys.exit(0)
