"""The error family: a name for every failure a user can cause; messages say what is allowed."""


class SglEagleError(Exception):
    """Root of all errors that a command reports in one line, without a traceback."""


class TreeLimitsError(SglEagleError, ValueError):
    """A combination of num_steps, topk and num_draft_tokens that no tree can satisfy."""


class PolicyConfigError(SglEagleError, ValueError):
    """A policy parameter outside its range, or a policy file that cannot be used."""


class TraceError(SglEagleError, ValueError):
    """A trace that is malformed, truncated, of an unknown version or unfit for its use."""


class CostTableError(SglEagleError, ValueError):
    """A cost table that is malformed, or measured on another setup."""


class CostTableRangeError(CostTableError):
    """A cost was asked for outside the measured grid; costs are never extrapolated."""


class CalibrationError(SglEagleError, ValueError):
    """Too little or unfit data to fit a calibration, or a malformed calibration."""


class CheckpointError(SglEagleError, ValueError):
    """A draft or target checkpoint that is missing, truncated or does not fit its partner."""


class PromptError(SglEagleError, ValueError):
    """A prompt file that is missing, empty or malformed."""


class ReportError(SglEagleError, ValueError):
    """Report data that is missing, malformed or of an unknown version."""


class OutputError(SglEagleError, OSError):
    """An output path that cannot be written."""
