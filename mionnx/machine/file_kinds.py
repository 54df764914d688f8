"""Kinds of `.safetensors` files of mionnx, told by their metadata, with the reader of each."""

from collections.abc import Mapping

RESULT_KEY = "mionnx_result"  # its class is in the metadata
FILE_KINDS = {"mionnx_spec": "HookSpec", "mionnx_directions": "Directions"}
CACHES = {"kv": "KVCache", "rwkv": "RWKVState"}
OTHERS = {
    "mionnx_run": "it is a recorded run, which verify(against=...) reads",
    "mionnx_sweep": "it is the progress of a sweep, which the same sweep continues with resume=...",
}


def whose(metadata: Mapping[str, str]) -> str:
    """Name the content and the reader of a file, in the message of another reader."""
    for key, words in OTHERS.items():
        if key in metadata:
            return words
    kind = metadata.get("kind") if RESULT_KEY in metadata else None
    kind = CACHES.get(metadata.get("mionnx_cache", ""), kind)
    kind = next((name for key, name in FILE_KINDS.items() if key in metadata), kind)
    if kind is None:
        return "it is not of a kind that mionnx writes"
    return f"it is a saved {kind}, which {kind}.load reads"
