"""Loading the demo target."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch installed")
pytest.importorskip("transformers", reason="needs transformers installed")

from sgl_eagle.reference import loading  # noqa: E402

pytestmark = pytest.mark.reference


class WithBar:
    """Stands for the loaders of transformers: draws a bar on stderr, as over GGUF tensors."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        from tqdm.auto import tqdm

        for _step in tqdm(range(3), desc="Converting"):
            pass
        return torch.nn.Linear(1, 1)


def test_no_bar_of_transformers_is_shown(monkeypatch, capsys):
    WithBar.from_pretrained()
    assert "Converting" in capsys.readouterr().err
    monkeypatch.setattr(loading, "AutoModelForCausalLM", WithBar)
    monkeypatch.setattr(loading, "AutoTokenizer", WithBar)
    before = sys.stderr
    loading.load_target("smollm2", dtype=torch.float32)
    assert capsys.readouterr().err == ""
    assert sys.stderr is before
