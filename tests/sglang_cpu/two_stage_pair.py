"""The tiny pair with a coarse two-stage head, whose drafts are often others than the full head's.

Runs in the fork server.
"""

import shutil
from pathlib import Path

from sgl_eagle.reference.draft_checkpoint import read_tensors
from sgl_eagle.reference.head_checkpoint import (
    FACTORS_FILE,
    FactorsInfo,
    LocalShortlist,
    activate_head,
    save_factors,
)
from sgl_eagle.reference.head_factors import factorize_head, row_norms

RANK, TILE = 24, 64


def make_two_stage_pair(pair, folder):
    pair, folder = Path(pair), Path(folder)
    (folder / "target").symlink_to(pair / "target")
    shutil.copytree(pair / "draft", folder / "draft")
    head = read_tensors(folder / "draft")["lm_head.weight"]
    info = FactorsInfo(
        method="svd",
        rank=RANK,
        vocab_size=len(head),
        relative_error=0,
        row_norms=row_norms(head),
        num_tokens=0,
        smoothing=0,
        text="none",
    )
    save_factors(folder / "draft" / FACTORS_FILE, factorize_head(head, RANK), info)
    activate_head(folder / "draft", LocalShortlist(tile_size=TILE, per_tile=1))
