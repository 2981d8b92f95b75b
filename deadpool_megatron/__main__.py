"""``python -m deadpool_megatron`` is the ``deadpool`` command."""

import sys

try:
    from deadpool_megatron.cli import main
except ModuleNotFoundError as error:  # this Python lacks the dependencies of the package
    reason = f"{sys.executable} has no package {error.name}"
    print(f"deadpool: {reason}: use the Python that deadpool is installed in", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
