"""The commit that a measurement belongs to, for the results files of the scripts here."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit():
    """The commit of this source tree, with "-dirty" where it has changes; None where it is no git checkout."""

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()

    try:
        # A copy of the tree inside another checkout has no commit of its own.
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            return None
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return None
