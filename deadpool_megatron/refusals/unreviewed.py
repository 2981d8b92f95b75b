"""Flags of Megatron-LM that nobody vouches for, by family, and what a command line has of them.

The families are of core_v0.16.1 and give the reason why. What came later, or is of the user's own
script, and stands in none of :mod:`.refused`, :mod:`.reviewed` and :mod:`.values` is unreviewed as
well. Each is refused by its name, unless the user answers for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import PurePath

from deadpool_megatron.refusals.families import Family
from deadpool_megatron.refusals.refused import REFUSED
from deadpool_megatron.refusals.reviewed import REVIEWED
from deadpool_megatron.refusals.rows import split_words
from deadpool_megatron.refusals.values import unread_values

#: lets one unreviewed flag through, by its name without dashes, or one value of one, as
#: ``flag=value``; may be given several times
ALLOW_UNREVIEWED = "--deadpool-allow-unreviewed"

UNREVIEWED = (
    Family(
        "state-space layers",
        "a stage of a hybrid model has other kinds of layers than its neighbours, and none was"
        " ever trained under protection",
        """
        mamba-state-dim mamba-head-dim mamba-num-groups mamba-num-heads disable-mamba-mem-eff-path
        linear-attention-freq linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim
        linear-num-key-heads linear-num-value-heads
        """,
    ),
    Family(
        "code of the user's",
        "it can keep any state anywhere",
        "spec enable-experimental use-legacy-models",
    ),
    Family(
        "further context parallelism",
        "it makes groups within groups, which no test has",
        "hierarchical-context-parallel-sizes max-seqlen-per-dp-cp-rank",
    ),
    Family(
        "further groups and shardings",
        "they are made for sharded data parallelism, which is refused",
        """
        create-all-gather-group fsdp-manual-registration data-parallel-sharding-strategy
        outer-dp-sharding-strategy fsdp-double-buffer suggested-communication-unit-size
        keep-fp8-transpose-cache enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward
        no-strict-fsdp-dtensor-load disable-strict-fsdp-dtensor-load init-model-with-meta-device
        """,
    ),
    Family(
        "other generators of random numbers",
        "a generation holds those of the trackers that training has",
        "inference-rng-tracker",
    ),
    Family(
        "other checkpoints",
        "no test falls back to one that is written so, or reads with it",
        "dist-ckpt-save-pre-mcore-014 ckpt-convert-update-legacy-dist-opt-format",
    ),
    Family(
        "other ways to read data",
        "a spare that builds without peers relies on how the index files are found",
        """
        per-dataset-sequences-path dataloader-fast-cache-load dataloader-defer-npy-index-mmap
        object-storage-cache-path sample-rate
        """,
    ),
    Family(
        "records of a process",
        "it belongs to a rank's process, and a role changes its process",
        """
        config-logger-dir dump-param-to-param-group-map record-memory-history memory-snapshot-path
        test-mode
        """,
    ),
    Family(
        "signals",
        "deadpool uses signals of its own to ask processes for their stacks and to end them",
        "exit-signal",
    ),
    Family(
        "kitchen",
        "no test has the package",
        "use-kitchen-attention kitchen-attention-backend",
    ),
    Family(
        "set by Megatron-LM itself",
        "no user has to give it",
        "mtp-standalone onnx-safe",
    ),
    Family(
        "inference",
        "nothing is trained with it",
        """
        inference-batch-times-seqlen-threshold max-tokens-to-oom output-bert-embeddings
        bert-embedder-type use-legacy-static-engine inference-max-requests inference-max-seq-length
        inference-max-batch-size inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-paused-buffer-size-gb
        inference-dynamic-batching-block-size inference-dynamic-batching-max-requests
        inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-track-paused-request-events decode-only-cuda-graphs
        inference-dynamic-batching-unified-memory-level nccl-all-reduce-for-prefill
        enable-chunked-prefill disable-chunked-prefill
        inference-dynamic-batching-cuda-graph-max-tokens
        inference-dynamic-batching-cuda-graph-mixed-prefill-count inference-logging-step-interval
        inference-wandb-logging no-inference-wandb-logging inference-coordinator-port
        inference-fuse-tp-communication flash-decode mlp-chunks-for-prefill cache-mla-latents
        moe-pad-experts-for-cuda-graph-inference
        """,
    ),
    Family(
        "reinforcement learning",
        "rollouts and a second model are state that no generation holds",
        """
        rl-prompts-per-eval grpo-prompts-per-step grpo-group-size grpo-iterations
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward langrl-inference-server-type
        langrl-inference-server-conversation-template langrl-external-server
        no-langrl-external-server langrl-env-config rl-default-temperature rl-default-top-p
        rl-default-top-k rl-offload-optimizer-during-inference rl-offload-kv-cache-during-training
        no-rl-offload-kv-cache-during-training rl-remove-kv-cache-during-training
        no-rl-remove-kv-cache-during-training rl-reset-cuda-graphs no-rl-reset-cuda-graphs
        rl-partial-rollouts no-rl-partial-rollouts rl-inference-logprobs-is-correction
        no-rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef
        rl-use-sequence-packing no-rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin
        rl-sequence-packing-algo rl-training-cuda-graphs no-rl-training-cuda-graphs
        rl-inference-tensor-model-parallel-size rl-inference-pipeline-model-parallel-size
        rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
        rl-inference-model-unified-memory-level rl-offload-inference-model-weights-when-idle
        no-rl-offload-inference-model-weights-when-idle refit-method rl-verify-model-weights-swap
        no-rl-verify-model-weights-swap rl-parallel-generation-tasks rl-skip-bos-token
        no-rl-skip-bos-token
        """,
    ),
    Family(
        "models other than GPT",
        "only pretrain_gpt.py was ever run under protection",
        """
        encoder-num-layers decoder-num-layers encoder-seq-length decoder-seq-length mask-prob
        short-seq-prob bert-no-binary-head relative-attention-num-buckets
        relative-attention-max-distance mrope-section ict-head-size biencoder-projection-dim
        biencoder-shared-query-context-model ict-load bert-load titles-data-path query-in-block-prob
        use-one-sent-docs evidence-data-path retriever-report-topk-accuracies
        retriever-score-scaling block-data-path embedding-path indexer-batch-size
        indexer-log-interval num-classes img-h img-w num-channels patch-dim classes-fraction
        data-per-class-fraction no-data-sharding head-lr-mult vision-pretraining-type
        vision-backbone-type swin-backbone-type mask-type mask-factor iter-per-epoch
        dino-local-img-size dino-local-crops-number dino-head-hidden-size dino-bottleneck-size
        dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp dino-teacher-temp
        dino-warmup-teacher-temp-epochs
        """,
    ),
)

#: Scripts of Megatron-LM that were never run under protection.
UNREVIEWED_SCRIPTS = (
    "pretrain_bert.py",
    "pretrain_hybrid.py",
    "pretrain_ict.py",
    "pretrain_mamba.py",
    "pretrain_t5.py",
    "pretrain_vision_classify.py",
    "pretrain_vision_dino.py",
    "pretrain_vision_inpaint.py",
    "pretrain_vlm.py",
    "train_rl.py",
)


def unreviewed(argv: Sequence[str]) -> str:
    """One line about what is on the command line of a script that nobody vouches for; empty when
    there is nothing. Look at :data:`REFUSED` first: its rows have better advice."""
    answered_for = set(allowed(argv))
    found = [name for name in _unvouched(argv) if name.lstrip("-") not in answered_for]
    if not found:
        return ""
    first = found[0]
    others = f" (unreviewed as well: {', '.join(found[1:])})" if found[1:] else ""
    return (
        f"{first} is not reviewed: {_why_unreviewed(first)}; leave it out, or answer for it"
        f" yourself with {ALLOW_UNREVIEWED} {first.lstrip('-')}{others}"
    )


def let_through(argv: Sequence[str]) -> list[str]:
    """Returns what is unreviewed and on the command line all the same, for the log."""
    answered_for = set(allowed(argv))
    return [name for name in _unvouched(argv) if name.lstrip("-") in answered_for]


def allowed(argv: Sequence[str]) -> list[str]:
    """Returns the names that a command line gives behind :data:`ALLOW_UNREVIEWED`."""
    words = [word for argument in argv for word in split_words(argument)]
    return [
        value.lstrip("-") for flag, value in itertools.pairwise(words) if flag == ALLOW_UNREVIEWED
    ]


def _unvouched(argv: Sequence[str]) -> list[str]:
    """Returns the script, if it is one of Megatron-LM's that was never tried, each flag that is
    neither reviewed, nor in a row, nor of deadpool itself, and each value that came to a flag
    after it was read."""
    script = [PurePath(argv[0]).name] if argv else []
    flags = [split_words(argument)[0] for argument in argv[1:]]
    known = {flag for row in REFUSED for flag in row.flags}
    known |= {flag for family in REVIEWED for flag in family.flags}
    return [
        *(name for name in script if name in UNREVIEWED_SCRIPTS),
        *dict.fromkeys(
            flag
            for flag in flags
            if flag.startswith("--")
            and flag not in known
            and not flag.startswith("--deadpool-")
            and flag != "--deadpool"
        ),
        *dict.fromkeys(unread_values(argv[1:])),
    ]


def _why_unreviewed(name: str) -> str:
    if not name.startswith("--"):
        return "only pretrain_gpt.py was ever run under protection"
    reasons = (family.reason for family in UNREVIEWED if name in family.flags)
    return next(reasons, "nobody has looked at what it does to state, communicators and streams")
