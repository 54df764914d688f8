"""One arena for the activations of all sessions on the CPU.

A session of its own arena keeps what its largest run took, and a sweep opens a session a layer: together many times
what is in use at any moment. The shared arena grows to what the largest run takes; `shrink` returns what is free in it.
Packed weights are no part of it, so that they are returned when their session ends.
"""

from typing import Any

import onnx
import onnxruntime

from mionnx.machine.once import Once

SHRINK = "memory.enable_memory_arena_shrinkage"  # of a run: return free regions of these arenas after it
AS_REQUESTED = 1  # regions have the size that is asked for, not the next power of two


def share(settings: onnxruntime.SessionOptions) -> None:
    """Let a session on the CPU take its activations from the arena of all."""
    _made.get("arena", _register)
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


def shrink() -> None:
    """Return the memory of the arena that no value lies in."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(SHRINK, "cpu:0")
    _made.get("shrinker", _shrinker).run(["to"], {"from": [0.0]}, options)


_made: Once[str, Any] = Once()  # one of each a process, whichever thread asks first


def _register() -> None:
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    where = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory)
    onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg({"arena_extend_strategy": AS_REQUESTED}))


def _shrinker() -> onnxruntime.InferenceSession:
    """A session of one node, run only to shrink the arena at its end."""
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("from", "to")]
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["from"], ["to"])], "shrink", ends[:1], ends[1:])
    model = onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    share(settings)
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
