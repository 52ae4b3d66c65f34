from torchvision.absent import make_absent as __getattr__  # noqa: F401  (PEP 562)
from torchvision.transforms import InterpolationMode  # noqa: F401
