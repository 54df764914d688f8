"""Small random models of all families, exported, so that the step "families" opens them where nothing is traced.

python benchmarks/gpu/family_exports.py FOLDER [FAMILY ..]
"""

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "tests" / "shared")]

NEEDED = (".onnx", ".data", ".safetensors", "config.json")
PROCESSES = 2


def export_family(folder: Path, family: str) -> str:
    """Export a family's model; returns its size, or why there is none."""
    from encoder_rows import AS_ENCODER
    from encoders import make_encoder, usual_head
    from family_models import MissingError, first_line, make_decoder

    from exporters.transformers import export

    target = folder / family.replace(" ", "_")
    if target.exists():
        return f"{family}: there"
    with TemporaryDirectory() as made:
        source, hooked = Path(made) / "checkpoint", Path(made) / "hooked"
        try:
            if family.endswith(AS_ENCODER):
                name = family.removesuffix(AS_ENCODER)
                make_encoder(name, source, usual_head(name))
            else:
                make_decoder(family, source)
            export(source, hooked)
        except MissingError as error:
            return f"{family}: missing, {error}"
        except Exception as error:  # of any library: this family is not measured
            return f"{family}: {first_line(error)}"
        target.mkdir(parents=True)
        for file in hooked.iterdir():
            if file.name.endswith(NEEDED):
                shutil.copyfile(file, target / file.name)
    return f"{family}: {sum(one.stat().st_size for one in target.iterdir()) / 1e3:.0f} kB"


def export_all(folder: Path, names: list[str]) -> None:
    """Export all families of decoders and encoders, or some."""
    from encoder_rows import AS_ENCODER
    from family_models import CONFIGS, FAMILIES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from exporters.transformers.encoder_families import ENCODERS

    encoders = [f"{name}{AS_ENCODER}" for name in ENCODERS]
    wanted = names or sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES, *CONFIGS, *encoders})
    with ProcessPoolExecutor(PROCESSES) as pool:
        for said in pool.map(partial(export_family, folder), wanted):
            print(said, flush=True)


if __name__ == "__main__":
    export_all(Path(sys.argv[1]), sys.argv[2:])
