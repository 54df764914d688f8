"""One forward pass."""

from mionnx import HookPoint, HookSpec, Intervention
from mionnx.inputs.token_batch import TokenBatch


def test_a_call_resolves_each_limit_of_a_spec_once(models, monkeypatch):
    """Values, masks, the check for an effect and the check for rows without a key read one table."""
    model, resolve, looked_up = models("llama"), TokenBatch.absolutes, []

    def counted(batch, given, row):
        looked_up.append((tuple(given), row))
        return resolve(batch, given, row)

    monkeypatch.setattr(TokenBatch, "absolutes", counted)
    spec = HookSpec().capture(HookPoint.ResidPost(1))
    spec.intervene(HookPoint.ResidPost(0), Intervention.Scale(0.5, positions=[1, -1]))
    spec.intervene("blocks.1.attn.hook_scores", Intervention.Add(1.0, positions=[2], heads=[0]))
    model.forward([[5, 6, 7, 8], [9, 10, 11, 12]], spec)
    assert sorted(looked_up) == [((1, -1), 0), ((1, -1), 1), ((2,), 0), ((2,), 1)]
