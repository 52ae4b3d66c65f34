import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "sgl_eagle": ROOT / "sgl_eagle",
    "sgl_eagle_harness": ROOT / "harness" / "sgl_eagle_harness",
    "sgl_eagle_kernels": ROOT / "kernels" / "sgl_eagle_kernels",
    "sgl_eagle_tuner": ROOT / "tuner" / "sgl_eagle_tuner",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # Built from a copy: setuptools leaves a build folder that later wheels would inherit.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES.values():
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(package, source / package.relative_to(ROOT), ignore=ignore)
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--wheel-dir", str(out), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("sgl_eagle-*-py3-none-any.whl"))


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    expected = {
        f"{name}/{file.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == expected
    assert {Path(name).name for name in names} >= {"LICENSE", "NOTICE"}


@pytest.mark.slow
def test_base_requirements_bring_no_torch(wheel):
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = [
        line.removeprefix("Requires-Dist: ")
        for line in archive.read(name).decode().splitlines()
        if line.startswith("Requires-Dist: ")
    ]
    base = {line for line in requirements if "extra ==" not in line}
    assert {"numpy>=1.26", "tqdm>=4.66"} <= base
    assert not [line for line in base if line.startswith(("torch", "transformers", "sglang"))]
    assert any(line.startswith("torch>=") for line in requirements)
