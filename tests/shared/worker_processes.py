"""The processes that tests of clusters kill."""

import psutil


def processes(name: str, of: int | None = None) -> list[psutil.Process]:
    """The living processes of a cluster that was begun by a process, this one by default, by their command line."""
    found = []
    for one in psutil.Process(of).children(recursive=True):
        try:
            if name in " ".join(one.cmdline()):
                found.append(one)
        except psutil.NoSuchProcess:  # it ended meanwhile; what is left of it waits for its parent
            continue
    return found
