"""Everything that a bare machine without a network lacks, in parts that can be carried there one by one.

    python benchmarks/gpu/gather.py [--parts benchmarks/gpu/parts] [--largest 35] [--architecture 90] [--whole]

1. Wheels of PyPI for the other machine's Python (`--python 3.12`), in this environment's versions: onnxruntime-gpu,
   cut down to one GPU architecture (`slim_wheel.py`; `--whole` leaves it as it is), and `PACKAGES`.
2. The graphs of `shapes.py`, exported without weights, so that nothing is traced there.
3. The tests' tiny checkpoints, exported, so that `tests/engine/test_cuda.py` traces nothing there either.
4. A small model of every family, exported (`family_exports.py`).
5. What pip knows of mionnx itself: its version, and its exporters by name.

`--no-wheels` leaves out 1, `--no-test-models` 3 and 4. `run.py install` joins the parts.
"""

import argparse
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, version
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY)]

import parts  # noqa: E402
from family_exports import export_all  # noqa: E402
from shapes import dtypes_of, shapes  # noqa: E402
from slim_wheel import slim  # noqa: E402

GPU = "onnxruntime-gpu"
# What an image with torch, onnx, numpy, scipy and pytest lacks, or has in another version.
PACKAGES = (
    "onnx-graphsurgeon", "onnx-ir", "onnxscript", "transformers", "tokenizers", "huggingface-hub", "safetensors",
    "optimum", "platformdirs", "ml_dtypes", "gguf", "httpx2", "httpcore2", "truststore",
)  # fmt: skip
LINUX = (
    *(f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
)
TESTS = "tests/engine/test_cuda.py"


def download(folder: Path, python: str, architecture: int, whole: bool) -> None:
    """Fetch the wheels, and cut the large one down."""
    folder.mkdir(parents=True)
    pins = [f"{name}=={version(name)}" for name in PACKAGES]
    target = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    target += [word for one in LINUX for word in ("--platform", one)]
    command = [sys.executable, "-m", "pip", "download", "-q", *target, "-d", folder, GPU, *pins]
    subprocess.run(command, check=True)
    if not whole:
        wheel = next(folder.glob(f"{GPU.replace('-', '_')}-*.whl"))
        large = wheel.rename(wheel.with_suffix(".whole"))
        sizes = slim(large, wheel, architecture)
        print(f"{wheel.name}: {large.stat().st_size / 1e6:.0f} MB with code for {sorted(sizes)}, "
              f"{wheel.stat().st_size / 1e6:.0f} MB with that for {architecture}")  # fmt: skip
        large.unlink()


def export_graphs(folder: Path, tiny: bool) -> None:
    """Export the graphs of all shapes, without weights."""
    from transformers import AutoConfig

    from exporters.transformers import export_graph

    for name, (family, config) in shapes(tiny).items():
        for dtype in dtypes_of(tiny)[name]:
            source, made = folder / "configs" / name, folder / f"{name}-{dtype}"
            AutoConfig.for_model(family, **config).save_pretrained(source)
            export_graph(source, made, dtype)
            print(f"{made.name}: {sum(one.stat().st_size for one in made.iterdir()) / 1e3:.0f} kB")
    shutil.rmtree(folder / "configs")


def make_test_models(folder: Path) -> None:
    """Let the tests make their checkpoints and export them, here and on the CPU."""
    environment = {**os.environ, "MIONNX_TEST_MODELS": str(folder), "PYTHONPATH": str(REPOSITORY)}
    wanted = ["-m", "not gpu", "-p", "no:xdist", "-o", "addopts=-q --import-mode=importlib"]
    subprocess.run([sys.executable, "-m", "pytest", TESTS, *wanted], cwd=REPOSITORY, env=environment, check=True)
    for lock in folder.rglob("*.lock"):
        lock.unlink()


def describe_mionnx(folder: Path) -> None:
    """Write the metadata of the checkout's own package where that of the wheels will be."""
    about = distribution("mionnx")
    target = folder / f"mionnx-{about.version}.dist-info"
    target.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (target / name).write_text(about.read_text(name) or "")


def main() -> None:
    """Gather everything, and part it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=Path, default=HERE / "parts")
    parser.add_argument("--largest", type=float, default=35, help="megabytes of a part")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--architecture", type=int, default=90, help="90: H100, H200; 80: A100; 120: RTX 5090")
    parser.add_argument("--whole", action="store_true", help="leave onnxruntime-gpu's wheel as it is")
    parser.add_argument("--no-wheels", action="store_true")
    parser.add_argument("--no-test-models", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(options.parts, ignore_errors=True)
    whole = options.parts / "whole"
    if not options.no_wheels:
        download(whole / "wheels", options.python, options.architecture, options.whole)
    describe_mionnx(whole / "site")
    export_graphs(whole / "graphs", options.tiny)
    if not options.no_test_models:
        make_test_models(whole / "tests")
        export_all(whole / "families", [])
    files = sorted((one for one in whole.rglob("*") if one.is_file()), key=lambda one: (one.suffix == ".whl", one))
    made = parts.split(files, options.parts, whole, int(options.largest * 1e6))
    shutil.rmtree(whole)
    for part in made:
        print(f"{part}: {sum(one.stat().st_size for one in part.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
