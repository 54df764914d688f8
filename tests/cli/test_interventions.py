"""The little language of interventions on the command line."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mionnx import InterventionError, MIError, SpecFileError
from mionnx.cli.interventions import parse


class TestGrammar:
    def test_limits(self):
        hook, edit = parse("zero", "blocks.1.attn.hook_z@heads=3;positions=0,-1;rows=1", 4, 5)
        assert (hook, edit.heads, edit.positions, edit.rows) == (["blocks.1.attn.hook_z"], (3,), (0, -1), (1,))

    def test_several_hook_points(self):
        hooks, edit = parse("scale", "blocks.*.hook_mlp_out,hook_embed=2@rows=0,1", 4, 5)
        assert (hooks, edit.value, edit.rows) == (["blocks.*.hook_mlp_out", "hook_embed"], 2, (0, 1))

    def test_numbers_and_tensors(self, tmp_path):
        save_file({"a:b": np.arange(3.0)}, tmp_path / "x.safetensors")
        assert parse("scale", "hook_embed=-0.5", 4, 5)[1].value == -0.5
        edit = parse("add", f"hook_embed={tmp_path}/x.safetensors:a:b*-2", 4, 5)[1]
        assert edit.value.tolist() == [0, -2, -4]

    def test_edges(self):
        mask = parse("knockout", "blocks.0.attn.hook_scores=-1>0,*>1", 2, 4)[1].value
        assert np.argwhere(np.isneginf(mask[0, 0])).tolist() == [[2, 1], [3, 0], [3, 1]]

    @pytest.mark.parametrize(
        ("kind", "text", "error", "message"),
        [
            ("zero", "hook_embed=1", InterventionError, "--zero takes"),
            ("add", "hook_embed", InterventionError, "--add takes"),
            ("add", "hook_embed=one", InterventionError, "neither a number nor"),
            ("add", "hook_embed=none.safetensors:key", SpecFileError, "cannot read"),
            ("scale", "hook_embed=1@position=1", InterventionError, "did you mean 'positions'"),
            ("scale", "hook_embed=1@positions=a", InterventionError, "no integer"),
            ("knockout", "blocks.0.attn.hook_scores=1-0", InterventionError, "no edge"),
            ("knockout", "blocks.0.attn.hook_scores=*>*", InterventionError, "no edge"),
        ],
    )
    def test_what_is_not_understood(self, kind, text, error, message):
        with pytest.raises(error, match=message):
            parse(kind, text, 2, 4)

    def test_a_key_that_is_not_there(self, tmp_path):
        save_file({"paris": np.ones(1)}, tmp_path / "x.safetensors")
        with pytest.raises(MIError, match="did you mean 'paris'"):
            parse("add", f"hook_embed={Path(tmp_path)}/x.safetensors:pariss", 2, 4)
