"""``python -m benchmarks.distributed``: see `jobs`."""

from benchmarks.distributed.jobs import main

raise SystemExit(main())
