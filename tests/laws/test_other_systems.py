"""What only Linux has is taken away: files of /proc and /sys, `malloc_trim`, hard links, limits of a process."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPOSITORY

from mionnx import HookSpec, InputError, Intervention, MIModel
from mionnx.inputs import chat_sandbox
from mionnx.machine import cache_keys, memory

AWAY = """
import ctypes, os, sys
from pathlib import Path
import numpy, onnx, onnxruntime, psutil  # these do have builds of their own for other systems

read, call = Path.read_text, ctypes.CDLL

def read_text(path, *given, **named):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return read(path, *given, **named)

def link(*_given, **_named):
    raise OSError(45, "Operation not supported")

Path.read_text, os.link, sys.modules["resource"], sys.platform = read_text, link, None, "darwin"
del os.posix_fallocate
"""
USE = """
import shutil
from mionnx import HookSpec, Intervention, MIModel
shutil.copytree(sys.argv[1], "copy")
model = MIModel.from_pretrained("copy")
spec = HookSpec().intervene("blocks.2.hook_resid_post", Intervention.Scale(2.0))
print(*model.generate("The capital of France is", max_new_tokens=1).new_texts)
print(model.forward("The capital of France is", spec).output().shape[1])
print(len(model.tokenize_chat([{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}")))
model.compile(spec, "compiled")
print(MIModel.from_pretrained(model.quantise("quantised", bits=8)).num_layers)
"""


def test_a_model_runs_without_what_linux_alone_has(tmp_path):
    known = {**os.environ, "MIONNX_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", AWAY + USE, str(REPOSITORY / "models" / "world-llama")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=known, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split() == ["Paris", "5", "1", "4"]


def test_memory_and_processor_are_known_without_proc(monkeypatch):
    def gone(path: Path, *_given: object, **_named: object) -> str:
        raise FileNotFoundError(path)

    memory.total.cache_clear()
    monkeypatch.setattr(Path, "read_text", gone)
    assert memory.total() >= memory.available() > 2**20
    assert memory.resident()[0] > 2**20
    memory.let_go([(Path(__file__), 0, 1)])
    assert cache_keys.processor_name()
    assert cache_keys.instruction_sets() == []
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.release() is False


def test_a_process_that_cannot_be_limited_still_renders(monkeypatch):
    import resource

    def refuse(*_given: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    chat_sandbox.limit_memory()


def test_weights_that_cannot_be_linked_are_copied_on_request(tmp_path, monkeypatch):
    def refuse(*_given: object, **_named: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(os, "link", refuse)
    model = MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")
    spec = HookSpec().intervene("blocks.2.hook_resid_post", Intervention.Scale(2.0))
    with pytest.raises(InputError, match=r"cannot be linked to .* use weights='alongside'"):
        model.compile(spec, tmp_path / "linked", weights="referenced")
    model.compile(spec, tmp_path / "alongside", weights="alongside")
