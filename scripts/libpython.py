"""Print the folder of this Python's shared library; exit with 1 when there is none.

Triton's Python stub is linked against libpython3.11.so.1.0 (or 3.12) and a Python that was linked statically, such as
Debian's own, comes without it. The folder next to the interpreter is asked first (pyenv puts it there), then the
system's library cache.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

NAME = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


def libpython_folder() -> Path | None:
    """Folder that holds the shared libpython of the running version, or None."""
    beside = [Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib"), Path(sys.base_prefix) / "lib"]
    for folder in beside:
        if (folder / NAME).is_file():
            return folder
    return cached_folder()


def cached_folder() -> Path | None:
    """The same from ldconfig's cache, which knows the distribution's packages."""
    for ldconfig in ("/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if Path(ldconfig).is_file():
            listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False).stdout
            for line in listing.splitlines():
                if line.split(maxsplit=1)[:1] == [NAME] and " => " in line:
                    return Path(line.rsplit(" => ", 1)[1]).parent
    return None


if __name__ == "__main__":
    folder = libpython_folder()
    if folder is None:
        sys.exit(1)
    print(folder)
