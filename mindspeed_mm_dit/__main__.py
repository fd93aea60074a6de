"""``python -m mindspeed_mm_dit COMMAND``: what ``mm-dit COMMAND`` is."""

import sys

from mindspeed_mm_dit.cli.main import main

sys.exit(main())
