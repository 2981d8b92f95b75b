"""``python -m deadpool_megatron`` is the ``deadpool`` command."""

import sys

from deadpool_megatron.cli import main

if __name__ == "__main__":
    sys.exit(main())
