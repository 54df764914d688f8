"""TransformerLens' names in recurrent mixers: those that mean a hook point of ours, and those that nearly do."""

# TransformerLens' names of recurrent mixers whose values are ours, number for number: `linear_attn` of its gated delta
# nets, `mixer` of its state-space models. Of each a variant of ours.
LENS_NAMES = {
    **dict.fromkeys(("linear_attn.hook_in", "mixer.hook_in"), "SsmPre"),
    **{f"{mixer}.hook_{out}": "AttnOut" for mixer in ("linear_attn", "mixer") for out in ("out", "ssm_out")},
    "linear_attn.hook_v": "SsmV",
    "linear_attn.hook_recurrence_out": "SsmY",
    "linear_attn.hook_ssm_state": "SsmStates",
}
# Others are values beside ours: the name here, and what it says that theirs does not.
LENS_NEAR = {
    **dict.fromkeys(("linear_attn.hook_q", "linear_attn.hook_ssm_C"), ("ssm.hook_q", "after norm and scale, by head")),
    **dict.fromkeys(("linear_attn.hook_k", "linear_attn.hook_ssm_B"), ("ssm.hook_k", "after norm, by head")),
    **dict.fromkeys(("linear_attn.hook_beta", "linear_attn.hook_ssm_write"), ("ssm.hook_write", "[.., n_heads, 1]")),
    **dict.fromkeys(
        ("linear_attn.hook_log_decay", "linear_attn.hook_ssm_decay"), ("ssm.hook_log_decay", "[.., n_heads, 1]")
    ),
    "linear_attn.hook_gate_input": ("ssm.hook_z", "behind the gate and its norm"),
    "mixer.hook_conv": ("ssm.hook_conv", "after its activation"),
    "mixer.hook_ssm_dt": ("ssm.hook_dt", "after softplus"),
    "mixer.hook_ssm_write": ("ssm.hook_v", "k (x) v is what is written"),
    "mixer.hook_ssm_state": ("ssm.hook_states", "[.., key, value]"),
}
