"""The commands `mionnx cache ls|info|verify|prune|clear`: the disk cache, exported models among it."""

import json
from collections import Counter
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column

from mionnx.cli.options import Json
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
def list_(as_json: Json = False) -> None:
    """List the entries, least recently used first.

    Weights of an exported model that are the checkpoint's own files under another name take no room: they are named
    apart from its size.

    Example: mionnx cache ls --json
    """
    listed = [_facts(entry) for entry in _cache().all()]
    if as_json:
        typer.echo(json.dumps(listed, indent=1))
        return
    table = Table("kind", Column("key", no_wrap=True), Column("size", justify="right"), "last used", "in use", "what")
    for facts in listed:
        what = [f"{name} {value}" for name, value in facts["what"].items()]
        what += [f"and {format_bytes(facts['shared_bytes'])} of the checkpoint's files"] * bool(facts["shared_bytes"])
        key, size = facts["key"] if facts["kind"] == MODELS else facts["key"][:12], format_bytes(facts["bytes"])
        table.add_row(facts["kind"], key, size, facts["used"], "yes" * facts["in_use"], ", ".join(what))
    Console().print(table)


@app.command()
def info(as_json: Json = False) -> None:
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
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    size = f"{format_bytes(facts['bytes'])} of {format_bytes(cache.limit)}"
    typer.echo(f"{cache.root}: {len(entries)} entries, {size}, {facts['in_use']} in use")


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
def verify(as_json: Json = False) -> None:
    """Hash every file of every entry; exit code 1 if one is damaged.

    A damaged entry is made again when it is needed.

    Example: mionnx cache verify
    """
    faulty: list[dict[str, str]] = []
    for entry in track(_cache().all(), "verifying", console=Console(stderr=True)):
        for fault in _faults(entry):
            faulty.append({"kind": entry.kind, "key": entry.path.name, "fault": fault})
            if not as_json:
                typer.echo(f"{entry.kind}/{entry.path.name}: {fault}")
    if as_json:
        typer.echo(json.dumps(faulty, indent=1))
    if faulty:
        raise ModelError(f"{len(faulty)} faults; `mionnx cache clear` removes everything that is not in use")
    if not as_json:
        typer.echo("every entry is whole")


@app.command()
def prune(
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Such as 5GB; the cache's own limit if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove the least recently used entries until the cache fits; never one in use.

    Example: mionnx cache prune --to 5GB
    """
    cache = _cache()
    removed = cache.prune(size_of(to) if to else None)
    if as_json:
        typer.echo(json.dumps({"removed": len(removed), "bytes": cache.size}, indent=1))
        return
    typer.echo(f"removed {len(removed)} entries; {format_bytes(cache.size)} are left")


@app.command()
def clear(as_json: Json = False) -> None:
    """Remove every entry that is not in use, and the parts left by killed processes.

    Exported models are exported again when they are next opened.

    Example: mionnx cache clear
    """
    cache = _cache()
    unfinished, before = cache.tidy(), cache.all()
    kept = Counter(cache.remove(entry) for entry in before)
    removed = kept.pop("", 0)
    if as_json:
        typer.echo(json.dumps({"removed": removed, "stay": {**kept}, "unfinished": unfinished}, indent=1))
        return
    said = [f"removed {removed} entries"]
    said += [f"{count} are in use" if why == IN_USE else f"{count} stay: {why}" for why, count in kept.items()]
    said += [f"{unfinished} left by killed processes removed too"] * bool(unfinished)
    typer.echo("; ".join(said))
