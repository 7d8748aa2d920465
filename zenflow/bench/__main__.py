import sys

from zenflow.bench.command import main

sys.exit(main())
