"""Options of ONNX Runtime's execution providers, checked before a session is made.

ONNX Runtime ignores unknown ones of some providers, and of others it leaves the provider out and runs on the CPU.
"""

from collections.abc import Mapping

from mionnx.errors import InputError, nearest

DEVICE_ID = "device_id"
# Names that a provider reads, as its source lists them; a provider that is not here is left to ONNX Runtime.
KNOWN: dict[str, tuple[str, ...]] = {
    "CPUExecutionProvider": (),
    "CUDAExecutionProvider": (
        DEVICE_ID,
        "arena_extend_strategy",
        "cudnn_conv1d_pad_to_nc1d",
        "cudnn_conv_algo_search",
        "cudnn_conv_use_max_workspace",
        "do_copy_in_default_stream",
        "enable_cuda_graph",
        "enable_skip_layer_norm_strict_mode",
        "fuse_conv_bias",
        "gpu_external_alloc",
        "gpu_external_empty_cache",
        "gpu_external_free",
        "gpu_mem_limit",
        "has_user_compute_stream",
        "prefer_nhwc",
        "sdpa_kernel",
        "tunable_op_enable",
        "tunable_op_max_tuning_duration_ms",
        "tunable_op_tuning_enable",
        "use_ep_level_unified_stream",
        "use_tf32",
        "user_compute_stream",
    ),
}


def check_provider_options(provider: str, given: Mapping[str, str | int]) -> None:
    """Refuse options that a provider does not have.

    Args:
        provider: its full name.
        given: name -> value.

    Raises:
        InputError: an unknown name, or a device that is no number.
    """
    known = KNOWN.get(provider)
    for name in given:
        if known is not None and name not in known:
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"provider_options: {provider} has no option {name!r}; {there}{nearest(name, known)}")
    number = str(given.get(DEVICE_ID, 0))
    if not number.isdigit():
        raise InputError(f"provider_options: {DEVICE_ID} is the number of a device, got {given[DEVICE_ID]!r}")
