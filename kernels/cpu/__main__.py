"""``python -m trimtab.kernels.cpu build``: compiles the native kernels ahead of time, for images.

``trimtab kernels build`` executes it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trimtab.errors import KernelBuildError
from trimtab.kernels.cpu.build import LEVELS, build, supported_levels


def main() -> int:
    """Returns the exit code: 0 built, 1 not, with one line why."""
    parser = argparse.ArgumentParser(prog="trimtab kernels", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    options = commands.add_parser("build", help="compile the native CPU kernels", allow_abbrev=False)
    options.add_argument("--folder", type=Path, required=True, help="where the engine will look for them")
    names = [level.name for level in LEVELS]
    best = supported_levels()[0].name
    options.add_argument("--level", choices=names, default=best, help=f"instructions to build for (default: {best})")
    arguments = parser.parse_args()
    level = next(level for level in LEVELS if level.name == arguments.level)
    try:
        print(build(level, arguments.folder))
    except KernelBuildError as error:
        print(f"trimtab kernels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
