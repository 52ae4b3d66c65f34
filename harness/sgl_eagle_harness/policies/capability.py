"""What a policy can do beyond `SpecPolicy`, asked in every round."""

from __future__ import annotations

_KNOWN: dict[tuple[type, type], bool] = {}


def fulfils(policy: object, protocol: type) -> bool:
    """Whether a policy fulfils a runtime-checkable protocol.

    What `isinstance` says, for a hundredth of its time: it looks up every member of a protocol each
    time, and a class of policies either has them or not.

    Args:
        policy: Any policy.
        protocol: Of further members.

    Returns:
        What the first object of its class was found to fulfil.
    """
    key = type(policy), protocol
    known = _KNOWN.get(key)
    if known is None:
        known = _KNOWN[key] = isinstance(policy, protocol)
    return known
