"""The commands `mionnx cache ls|info|verify|prune|clear`: the disk cache, exported models among it."""

from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column

from mionnx.cli.injection import PRINTS, Output, with_groups
from mionnx.errors import MIError, ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.cache_entry import MODELS, CacheEntry
from mionnx.machine.disk_cache import IN_USE, DiskCache, size_of
from mionnx.machine.memory import format_bytes
from mionnx.run.find_model import cache_folder
from mionnx.view import Table

app = typer.Typer(
    help="Show and tidy the disk cache: exported and prepacked models, rewritten graphs, interrupted sweeps.\n\n"
    "Example: mionnx cache ls",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _cache() -> DiskCache:
    return DiskCache(cache_folder())


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "key": entry.path.name,
        "bytes": entry.size,
        "shared_bytes": entry.shared,
        "used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "what": entry.what,
    }


@app.command("ls")
@with_groups(output=PRINTS)
def list_(output: Output) -> None:
    """List the entries, least recently used first.

    Weights of an exported model that are the checkpoint's own files under another name take no room: they are named
    apart from its size.

    Example: mionnx cache ls --json
    """
    entries = [_facts(entry) for entry in _cache().all()]
    table = Table("kind", Column("key", no_wrap=True), Column("size", justify="right"), "last used", "in use", "what")
    for facts in entries:
        what = [f"{name} {value}" for name, value in facts["what"].items()]
        what += [f"and {format_bytes(facts['shared_bytes'])} of the checkpoint's files"] * bool(facts["shared_bytes"])
        # A model's key says its name; others are hashes, of which a beginning tells them apart.
        key, size = facts["key"] if facts["kind"] == MODELS else facts["key"][:12], format_bytes(facts["bytes"])
        table.add_row(facts["kind"], key, size, facts["used"], "yes" * facts["in_use"], ", ".join(what))
    output.deliver(entries, entries, [table])


@app.command()
@with_groups(output=PRINTS)
def info(output: Output) -> None:
    """Print the cache folder, its size and its limit.

    Example: mionnx cache info
    """
    cache = _cache()
    entries = cache.all()
    facts: dict[str, Any] = {
        "folder": str(cache.root),
        "entries": len(entries),
        "bytes": cache.size,
        "limit": cache.limit,
        "in_use": sum(entry.in_use for entry in entries),
    }
    size = f"{format_bytes(facts['bytes'])} of {format_bytes(cache.limit)}"
    output.deliver(cache, facts, [f"{cache.root}: {len(entries)} entries, {size}, {facts['in_use']} in use"])


def _faults(entry: CacheEntry) -> list[str]:
    if entry.kind != MODELS:
        return entry.faults(thorough=True)
    try:
        if HookedModel.open(entry.path).metadata.weight_files:
            HookedModel.open(entry.path, check="full")
    except MIError as error:
        return [str(error)]
    return []


@app.command()
@with_groups(output=PRINTS)
def verify(output: Output) -> None:
    """Hash every file of every entry; exit code 1 if one is damaged.

    A damaged entry is made again when it is needed.

    Example: mionnx cache verify
    """
    faulty = [
        {"kind": entry.kind, "key": entry.path.name, "fault": fault}
        for entry in track(_cache().all(), "verifying", console=Console(stderr=True))
        for fault in _faults(entry)
    ]
    lines = [f"{one['kind']}/{one['key']}: {one['fault']}" for one in faulty]
    output.deliver(faulty, faulty, lines or ["every entry is whole"])
    if faulty:
        raise ModelError(f"{len(faulty)} faults; `mionnx cache clear` removes everything that is not in use")


@app.command()
@with_groups(output=PRINTS)
def prune(
    output: Output,
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Such as 5GB; the cache's own limit if left out.")
    ] = None,
) -> None:
    """Remove the least recently used entries until the cache fits; never one in use.

    Example: mionnx cache prune --to 5GB
    """
    cache = _cache()
    removed = len(cache.prune(size_of(to) if to else None))
    line = f"removed {removed} entries; {format_bytes(cache.size)} are left"
    output.deliver(cache, {"removed": removed, "bytes": cache.size}, [line])


@app.command()
@with_groups(output=PRINTS)
def clear(output: Output) -> None:
    """Remove every entry that is not in use, and the parts left by killed processes.

    Exported models are exported again when they are next opened.

    Example: mionnx cache clear
    """
    cache = _cache()
    # What killed processes left is no entry.
    unfinished, before = cache.tidy(), cache.all()
    # `remove` says why an entry stays, and nothing where it went.
    stay = Counter(cache.remove(entry) for entry in before)
    removed = stay.pop("", 0)
    parts = [f"removed {removed} entries"]
    parts += [f"{count} are in use" if why == IN_USE else f"{count} stay: {why}" for why, count in stay.items()]
    parts += [f"{unfinished} left by killed processes removed too"] * bool(unfinished)
    output.deliver(cache, {"removed": removed, "stay": {**stay}, "unfinished": unfinished}, ["; ".join(parts)])
