"""``python -m usp_viz``."""

from usp_viz.cli import main

raise SystemExit(main())
