"""`python -m sgl_eagle.cli` is `sgl-eagle`."""

import sys

from sgl_eagle.cli.frame.main import main

sys.exit(main())
