"""Exporters: checkpoints become hooked models here, the only place that imports torch and transformers.

An exporter is a module with two functions, found by mionnx through the entry-point group `mionnx.exporters`:

    recognises(folder: Path) -> bool
    export(folder: Path, target: Path, dtype: str, progress: Progress) -> None

`recognises` must be cheap and import nothing heavy; `export` writes a hooked model into `target`, or raises `MIError`.
"""
