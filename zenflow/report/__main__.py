import sys

from zenflow.report.command import main

sys.exit(main())
