"""Execution providers that are not there are refused."""

import pytest

from mionnx import MIModel, RuntimeMissingError


def test_a_provider_that_is_not_there(hooked):
    with pytest.raises(RuntimeMissingError, match="CPUExecutionProvider"):
        MIModel.from_pretrained(hooked("llama"), provider="CPUExecutionProvder")
