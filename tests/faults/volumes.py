"""Small disks that run full: tmpfs in a mount namespace, so that nothing is left behind.

Where root is not allowed, the namespace belongs to a user namespace. Runs enter it with
`processes.enter_namespace`; readers look in through /proc.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from processes import enter_namespace

_AS_USER = ["--user", "--map-root-user"]


@dataclass(frozen=True)
class Volume:
    """A tmpfs at `path` for runs of `enter`; the same files are at `seen` for everyone else."""

    process_id: int
    path: Path

    @property
    def seen(self):
        return Path(f"/proc/{self.process_id}/root{self.path}")

    @property
    def enter(self):
        return functools.partial(enter_namespace, self.process_id)

    def mount(self, options):
        """Options of tmpfs, such as `size=40k`."""
        self._run("mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path)

    def resize(self, options):
        self.mount(f"remount,{options}")

    def unmount(self):
        self._run("umount", self.path)

    def command(self, *arguments):
        """A command line that runs `arguments` where the volume is."""
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        inside = ["nsenter", "--target", self.process_id, *user, "--mount", "--wd=/", *arguments]
        return [str(argument) for argument in inside]

    def _run(self, *arguments):
        subprocess.run(self.command(*arguments), check=True, capture_output=True, text=True)


def unshare():
    """A command line that starts in a mount namespace of its own, and why not, if none may be."""
    if not all(map(shutil.which, ("unshare", "nsenter", "mount"))):
        return [], "there is no unshare, nsenter or mount here"
    command = ["unshare", *(_AS_USER if os.geteuid() else []), "--mount"]
    probe = subprocess.run(
        [*command, "mount", "-t", "tmpfs", "tmpfs", tempfile.gettempdir()],
        capture_output=True,
        text=True,
    )
    return command, probe.stderr.strip() if probe.returncode else ""
