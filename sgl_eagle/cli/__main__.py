"""`python -m sgl_eagle.cli` is `sgl-eagle`."""

import sys

from sgl_eagle.cli import main

sys.exit(main())
