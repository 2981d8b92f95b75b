"""The results of a run that is over: ``final.json``, and facts of its events."""

from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Kind, read_events
from tests.common.event_schema import check_event


def read_final(directory: Path) -> dict[str, Any]:
    """Return ``final.json`` with the keys ``steps``, ``evaluations``, ``hashes``, ``durable``, and
    all ``recoveries``. A coordinator that took over may repeat reports, but only with equal values.
    """
    run = RunDirectory(directory)
    numbers: dict[Kind, dict[int, dict[str, Any]]] = {Kind.STEP: {}, Kind.EVALUATION: {}}
    hashes: dict[str, dict[str, str]] = {}
    recoveries: dict[int, dict[str, Any]] = {}
    durable = []
    for event in read_events(run.events):
        check_event(event.to_dict())
        iteration = event.iteration or 0
        if event.kind in numbers:
            first = numbers[event.kind].setdefault(
                iteration, {"iteration": iteration, **event.data}
            )
            assert first == {"iteration": iteration, **event.data}, (first, event)
        elif event.kind is Kind.STATE_HASH:
            hashes.setdefault(str(iteration), {})[str(event.role)] = event.data["sha256"]
        elif event.kind is Kind.RECOVERED:
            recoveries[event.epoch] = {"epoch": event.epoch, **event.data}
        elif event.kind is Kind.DURABLE:
            durable.append({"iteration": iteration, **event.data})
        elif event.kind is Kind.EPOCH_DECIDED and "forgotten_from" in event.data:
            for known in numbers.values():
                for gone in [k for k in known if k >= event.data["forgotten_from"]]:
                    del known[gone]
    final = read_json(run.final)
    recoveries |= {report["epoch"]: report for report in final["recoveries"]}
    return {
        **final,
        "steps": [step for _, step in sorted(numbers[Kind.STEP].items())],
        "evaluations": [found for _, found in sorted(numbers[Kind.EVALUATION].items())],
        "hashes": hashes,
        "recoveries": [report for _, report in sorted(recoveries.items())],
        "durable": durable,
    }
