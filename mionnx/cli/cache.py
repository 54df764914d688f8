"""The command line's part about the store: `mionnx cache ls|info|verify|prune|clear`."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from mionnx.errors import ModelError
from mionnx.machine.disk_cache import CacheEntry, DiskCache, size_of
from mionnx.machine.memory import format_bytes
from mionnx.run.find_model import cache_folder

app = typer.Typer(help="The store of prepared bases, rewritten graphs and interrupted sweeps.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _entries() -> DiskCache:
    return DiskCache(cache_folder())


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "key": entry.path.name,
        "bytes": entry.size,
        "used": datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds"),
        "in_use": entry.in_use,
        "what": entry.manifest.get("what", {}),
    }


@app.command("ls")
def list_(as_json: Json = False) -> None:
    """List the entries, the one used longest ago first."""
    found = [_facts(entry) for entry in _entries().all()]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table("kind", Column("key", no_wrap=True), Column("size", justify="right"), "last used", "in use", "what")
    for facts in found:
        what = ", ".join(f"{name} {value}" for name, value in facts["what"].items())
        table.add_row(
            facts["kind"], facts["key"][:12], format_bytes(facts["bytes"]), facts["used"], "yes" * facts["in_use"], what
        )
    Console().print(table)


@app.command()
def info(as_json: Json = False) -> None:
    """Say where the store is, how large it is and may become."""
    entries = _entries()
    found = entries.all()
    facts: dict[str, Any] = {
        "folder": str(entries.root),
        "entries": len(found),
        "bytes": sum(entry.size for entry in found),
        "limit": entries.limit,
        "in_use": sum(entry.in_use for entry in found),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
        return
    held = f"{format_bytes(facts['bytes'])} of {format_bytes(entries.limit)}"
    typer.echo(f"{entries.root}: {len(found)} entries, {held}, {facts['in_use']} in use")


@app.command()
def verify() -> None:
    """Hash every file of every entry; exit code 1 if one is damaged. It is made again when it is needed."""
    faulty = 0
    for entry in track(_entries().all(), "verifying", console=Console(stderr=True)):
        for fault in entry.faults(thorough=True):
            typer.echo(f"{entry.kind}/{entry.path.name}: {fault}")
            faulty += 1
    if faulty:
        raise ModelError(f"{faulty} faults; `mionnx cache clear` removes everything that is not in use")
    typer.echo("every entry is whole")


@app.command()
def prune(
    to: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Such as 5GB; the store's own limit if left out.")
    ] = None,
) -> None:
    """Remove the entries used longest ago until the store is small enough; never one that is in use."""
    entries = _entries()
    removed = entries.prune(size_of(to) if to else None)
    typer.echo(f"removed {len(removed)} entries; {format_bytes(sum(entry.size for entry in entries.all()))} are left")


@app.command()
def clear() -> None:
    """Remove every entry that no live process uses. Exported models stay."""
    entries = _entries()
    before = entries.all()
    removed = sum(entries.remove(entry) for entry in before)
    typer.echo(f"removed {removed} entries" + (f"; {len(before) - removed} are in use" * (removed < len(before))))
