from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("triton", reason="needs Triton")

from sgl_eagle_kernels import launch  # noqa: E402

CPU = torch.device("cpu")


def test_the_interpreter_gets_no_launch_options():
    assert launch.launch_options(CPU) == {"OVERLAP": False}


@pytest.mark.parametrize("shared_memory_bytes", [232448, 166912, 101376])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [1, 17, 64, 300])
def test_what_stage_1_keeps_on_chip_fits(monkeypatch, shared_memory_bytes, dtype, num_rows):
    from sgl_eagle_kernels.lm_head._triton import tiles

    monkeypatch.setattr(tiles, "shared_memory_bytes", lambda _: shared_memory_bytes)
    for rank in (64, 100, 256, 320, 4096):
        for part in (16, 32, 64, 256):
            blocks = tiles.choose_blocks(torch.empty(num_rows, rank, dtype=dtype), part, 501)
            # Parts of `up` that are under way, and the inputs of either one step or all.
            part_bytes = blocks.tokens * blocks.rank * dtype.itemsize
            input_bytes = blocks.rows * blocks.rank * dtype.itemsize
            assert blocks.stages >= 2
            assert (blocks.stages - 1) * part_bytes + input_bytes <= shared_memory_bytes


def test_shared_memory_is_asked_for_once(monkeypatch):
    calls = []

    class Driver:
        @staticmethod
        def cuFuncSetAttribute(function, attribute, value):  # noqa: N802 (the driver's name)
            calls.append((function.value, attribute, value))
            return 0

    monkeypatch.setattr(launch.ctypes, "CDLL", lambda _: Driver)
    monkeypatch.setattr(launch, "_asked", {})
    launch.leave_shared_memory(None)  # of the interpreter
    for function in (7, 7, 8):
        launch.leave_shared_memory(SimpleNamespace(function=function))
    assert calls == [(7, 9, 100), (8, 9, 100)]


@pytest.mark.gpu
def test_this_gpu_has_shared_memory_and_multiprocessors():
    device = torch.device("cuda", 0)
    assert launch.shared_memory_bytes(device) >= 48 * 1024
    assert launch.count_multiprocessors(device) >= 1
    overlaps = torch.cuda.get_device_capability(device) >= (9, 0)
    assert launch.launch_options(device).get("launch_pdl", False) == overlaps
