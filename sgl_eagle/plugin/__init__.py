"""Plugin for stock SGLang: `--speculative-algorithm SGL_EAGLE`."""

from __future__ import annotations


def register() -> None:
    """Entry point `sglang.srt.plugins`: runs once in every process that SGLang starts.

    SGLang logs and swallows what a plugin raises, so the success line is the proof that it ran.
    """
    import logging

    from sgl_eagle.plugin.algorithm import register_algorithm
    from sgl_eagle.plugin.server_flags import ALGORITHM_NAME, add_flags

    register_algorithm()
    add_flags()
    logging.getLogger(__name__).info("registered --speculative-algorithm %s", ALGORITHM_NAME)
