from torchvision.absent import make_absent as __getattr__  # noqa: F401  (PEP 562)


class ImageReadMode:
    RGB = "RGB"
