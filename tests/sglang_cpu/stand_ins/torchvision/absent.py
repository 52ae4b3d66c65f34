"""Names that exist when imported and fail when called."""


def make_absent(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_kwargs):
        raise NotImplementedError(f"the stand-in for torchvision has no {name}")

    return absent
