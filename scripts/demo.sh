#!/usr/bin/env bash
# Sets up (first time only), then shows a node of a training run die and nothing else happen.
#
#   ./scripts/demo.sh [--gpu] [--json FILE] [--plot FILE.png] [--run-dir DIR] [--iterations N]
#
# Exit status: 0 when the struck run ended bit-identical to the undisturbed one, 1 when it did
# not, 2 when something needed is missing.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/scripts/setup.sh"
exec "$root/.venv/bin/python" -m deadpool_megatron demo "$@"
