"""Commands on numbers: what a narrow dtype cannot hold, what that costs, and a cure."""

from collections.abc import Iterator
from typing import Any

from mionnx.analysis.numerics.diagnosis import Diagnosis
from mionnx.analysis.numerics.range_report import RangeReport
from mionnx.cli.command import Arguments, Command, Open
from mionnx.graph.hooked_model import HookedModel
from mionnx.model import MIModel

FOUND = 2  # the exit code where something overflows
EXAMPLE = "models/world-llama"


def _ranged(report: RangeReport) -> Iterator[Any]:
    yield report.table(len(report.rows) if report.over() else 10)
    yield report.line()


RANGE = Command(
    [MIModel.check_range],
    [f"mionnx range {EXAMPLE} --text text.txt --html range.html"],
    "Exit code 0 if nothing overflows, 2 if something does.",
    show=_ranged,
    exit_code=lambda report: FOUND if report.overflows else 0,
    settings=("dtype", "threads"),
    words={"dtype": "beside"},
)

FORECAST = Command(
    [MIModel.forecast],
    [f"mionnx forecast {EXAMPLE} --text text.txt --norms decomposed"],
    show=lambda forecast: [forecast.table(), forecast.line()],
    exit_code=lambda forecast: 0 if forecast.all.sound else FOUND,
    settings=("threads",),
)


def _narrow(open: Open, arguments: Arguments) -> dict[str, Any]:
    folder = open().narrow(**arguments)
    return {"folder": str(folder), **HookedModel.open(folder).metadata.narrowed}


def _narrowed(facts: dict[str, Any]) -> Iterator[str]:
    powers = ", ".join(f"{value} times 2^{power}" for value, power in facts["exponents"].items()) or "nothing rescaled"
    islands = f"{facts['islands']} values in float32" if facts["islands"] else "no islands"
    before, after = facts["before"], facts["after"]
    yield f"{facts['folder']}: {facts['dtype']}, {powers}, {islands}"
    was = "not finite" if before["not_finite"] else f"{before['kl']:.2g}"
    same = f", top-1 {after['top_1']:.1%}" if "top_1" in after else ""
    yield f"forecast {facts.get('measure', 'KL in nats')} {after['kl']:.2g} (without a remedy: {was}){same}"


NARROW = Command(
    [MIModel.narrow],
    [f"mionnx narrow {EXAMPLE} -o world-float16 --text text.txt"],
    call=_narrow,
    show=_narrowed,
    settings=("threads",),
    files=False,
)


def _diagnosed(diagnosis: Diagnosis) -> Iterator[Any]:
    yield diagnosis.table()
    yield diagnosis.line()
    yield from diagnosis.cure[1:]
    yield from (f"{one.runtime}: {one.why}" for one in diagnosis.checks if one.why)
    if diagnosis.folder:
        yield f"the sound model: {diagnosis.folder}"


DOCTOR = Command(
    [MIModel.doctor],
    [f"mionnx doctor {EXAMPLE} --text text.txt --target webgpu --html diagnosis.html"],
    "Exit code 0 if the model is sound in float16 as it is, 2 if it is not.",
    show=_diagnosed,
    exit_code=lambda diagnosis: 0 if diagnosis.sound else FOUND,
    settings=("threads",),
)
