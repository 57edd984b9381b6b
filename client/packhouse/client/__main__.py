"""``python -m packhouse.client``: the command ``packhouse`` of this interpreter."""

from packhouse.client.cli import main

raise SystemExit(main())
