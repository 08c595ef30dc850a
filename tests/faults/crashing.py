"""A process that dies at a chosen point, and the disk as a power cut would leave it at each.

A point is a step that changes a data set: a file opened for writing, a fsync, a rename, a folder
made, anything removed. Python's audit hooks announce each of these before it happens, all but
fsync, which is wrapped. Files written between two points may be cut short at the second: a process
can die in the middle of a write.
"""

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

_AT_FOLDER = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2}  # event -> which argument is dir_fd
_WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class Point:
    """One step: what is done, and to which path."""

    event: str
    path: Path


def on_points(root, call):
    """Call `call` with each Point below `root` before it happens, in one thread at a time."""
    lock = threading.RLock()

    def announce(event, path):
        if path.is_relative_to(root):
            with lock:
                call(Point(event, path))

    def hook(event, arguments):
        path = _path_of(event, arguments)
        if path is not None:
            announce(event, path)

    real_fsync = os.fsync

    def fsync(descriptor):
        announce("fsync", _path_of_descriptor(descriptor))
        real_fsync(descriptor)

    os.fsync = fsync
    sys.addaudithook(hook)


def _path_of(event, arguments):
    """The path that an audit event is about to change; None if it changes none."""
    if event == "open":
        path, _, flags = arguments
        is_write = flags & _WRITES and not isinstance(path, int)
        return Path(os.fsdecode(path)) if is_write else None
    if event == "os.rename":
        return Path(arguments[1])
    if event not in _AT_FOLDER:
        return None
    path, folder = Path(arguments[0]), arguments[_AT_FOLDER[event]]
    return path if folder < 0 else _path_of_descriptor(folder) / path


def _path_of_descriptor(descriptor):
    return Path(f"/proc/self/fd/{descriptor}").readlink()


def list_points(root, log):
    """For `before`: a line in `log` for each point of the run."""
    file = log.open("w", buffering=1)
    on_points(root, lambda point: print(point.event, point.path, file=file))


def die_at(root, number):
    """For `before`: SIGKILL right before point `number`, counted from 0."""
    Death(root, number)


class Death:
    """Counts points; at the last one cuts the file being written to half of what is new in it."""

    def __init__(self, root, number):
        self.left = number
        self.written = None  # the file opened at the point before, and its size then
        on_points(root, self.at)

    def at(self, point):
        if self.left < 0:
            return  # its own truncation
        self.left -= 1
        if self.left < 0:
            self.tear()
            os.kill(os.getpid(), signal.SIGKILL)
        path = point.path
        size = path.stat().st_size if path.is_file() else 0
        self.written = (path, size) if point.event == "open" else None

    def tear(self):
        if self.written is None or not self.written[0].is_file():
            return
        path, before = self.written
        now = path.stat().st_size
        os.truncate(path, min(before, now) + max(0, now - before) // 2)


def keep_power_cuts(root, cuts):
    """For `before`: what a power cut leaves of `root` after each fsync, as cuts/0, cuts/1, ..."""
    PowerCuts(root, cuts)


class PowerCuts:
    """Of a file only the content at its last fsync is left, of a folder the entries at its own.

    No real file system forgets that much, but none promises more. Each descriptor is held open, so
    that no inode number is given out twice.
    """

    def __init__(self, root, cuts):
        self.root, self.cuts = root.stat().st_ino, cuts
        self.files, self.folders, self.held = {}, {self.root: {}}, []
        self.count = 0
        on_points(root, self.at)

    def at(self, point):
        if point.event == "fsync":
            self.keep(point.path)
            self.write_out(self.root, self.cuts / str(self.count))
            self.count += 1

    def keep(self, path):
        self.held.append(os.open(path, os.O_RDONLY))
        inode = path.stat().st_ino
        if path.is_dir():
            self.folders[inode] = {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)}
        else:
            self.files[inode] = path.read_bytes()

    def write_out(self, inode, folder):
        folder.mkdir()
        for name, (entry, is_folder) in self.folders.get(inode, {}).items():
            if is_folder:
                self.write_out(entry, folder / name)
            else:
                (folder / name).write_bytes(self.files.get(entry, b""))
