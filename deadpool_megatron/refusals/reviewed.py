"""Flags of Megatron-LM that somebody has read and a recovery gets over, by family.

A family's reason holds for each of its flags. To review a flag, find in Megatron's source whether
it makes state that an iteration changes (is it in the optimizer, a module's parameters or buffers,
the generators or the counters?), groups or streams of its own, or something that an interrupted
step leaves behind, and whether the number of a layer or of a rank is built into what it makes.
"""

from __future__ import annotations

from deadpool_megatron.refusals.families import Family

REVIEWED = (
    Family(
        "shape of the model",
        "parameters and buffers are found in the model as it was built",
        """
        num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels num-query-groups
        group-query-attention max-position-embeddings position-embedding-type vocab-size
        padded-vocab-size make-vocab-size-divisible-by untie-embeddings-and-output-weights
        normalization norm-epsilon apply-layernorm-1p qk-layernorm qk-l2-norm softmax-type
        attention-output-gate apply-residual-connection-post-layernorm disable-bias-linear
        add-qkv-bias swiglu squared-relu quick-geglu openai-gelu glu-linear-offset
        activation-func-clamp-value use-rotary-position-embeddings rotary-base rotary-percent
        rotary-interleaved rotary-seq-len-interpolation-factor use-rope-scaling rope-scaling-factor
        rope-type no-position-embedding window-size multi-latent-attention q-lora-rank kv-lora-rank
        qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim
        """,
    ),
    Family(
        "layers that depend on their number",
        "stages that differ by it are of different classes, so no model changes its place",
        """
        apply-query-key-layer-scaling no-rope-freq window-attn-skip-freq moe-layer-freq
        first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16
        heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json mtp-num-layers
        mtp-loss-scaling-factor
        """,
    ),
    Family(
        "initial weights",
        "they are generation 0; a spare's own are replaced by those of the role that it takes",
        """
        seed init-method-std embedding-init-method-std init-method-xavier-uniform no-initialization
        use-cpu-initialization data-parallel-random-init
        """,
    ),
    Family(
        "split of the model over ranks",
        "roles and their groups are those of parallel_state, which are rebuilt; handles of a"
        " pipeline's transfers live in its schedule and end with it",
        """
        tensor-model-parallel-size pipeline-model-parallel-size sequence-parallel
        context-parallel-size cp-comm-type expert-model-parallel-size expert-tensor-parallel-size
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        pipeline-model-parallel-layout num-layers-per-virtual-pipeline-stage
        num-virtual-stages-per-pipeline-rank microbatch-group-size-per-virtual-pipeline-stage
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
        use-tp-pp-dp-mapping no-scatter-gather-tensors-in-pipeline no-overlap-p2p-communication
        overlap-p2p-communication-warmup-flush
        """,
    ),
    Family(
        "experts",
        "expert bias and token counts are buffers, trackers of losses are captured, jitter and"
        " random routing draw from the generators that a generation holds",
        """
        num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-shared-expert-gate
        moe-latent-size moe-router-topk moe-router-num-groups moe-router-group-topk
        moe-router-pre-softmax moe-router-topk-scaling-factor moe-router-score-function
        moe-router-dtype moe-router-load-balancing-type moe-aux-loss-coeff moe-z-loss-coeff
        moe-router-enable-expert-bias moe-router-bias-update-rate moe-router-force-load-balancing
        moe-router-padding-for-quantization moe-router-padding-for-fp8 moe-input-jitter-eps
        moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy
        moe-apply-probs-on-input moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion
        moe-router-fusion moe-layer-recompute moe-per-layer-logging
        """,
    ),
    Family(
        "precision",
        "masters, scaler, scales and histories of maxima are captured; the rest is arithmetic",
        """
        fp16 bf16 fp8-format fp8-margin fp8-amax-history-len fp8-amax-compute-algo no-fp8-wgrad
        disable-fp8-wgrad fp8-param-gather loss-scale initial-loss-scale min-loss-scale
        loss-scale-window hysteresis fp32-residual-connection attention-softmax-in-fp32
        accumulate-allreduce-grads-in-fp32 grad-reduce-in-bf16 fp16-lm-cross-entropy
        disable-bf16-reduced-precision-matmul
        """,
    ),
    Family(
        "kernels",
        "another way to compute the same, without state of its own",
        """
        attention-backend use-flash-attn deterministic-mode batch-invariant-mode
        cross-entropy-loss-fusion cross-entropy-fusion-impl no-masked-softmax-fusion
        no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
        no-persist-layer-norm no-gradient-accumulation-fusion use-fused-weighted-squared-relu
        use-te-activation-func disable-jit-fuser no-clone-scatter-output-in-embedding
        disable-clone-scatter-output-in-embedding
        """,
    ),
    Family(
        "recomputation of activations",
        "what it stores belongs to one step's graph; generators are set back by the step itself",
        """
        recompute-activations recompute-granularity recompute-method recompute-num-layers
        recompute-modules distribute-saved-activations
        """,
    ),
    Family(
        "dropout and loss",
        "draws from the generators that a generation holds",
        "hidden-dropout attention-dropout calculate-per-token-loss te-rng-tracker",
    ),
    Family(
        "optimizer",
        "numbers of parameter groups are captured with them; Adam's state in each of these types"
        " is in the inventory",
        """
        weight-decay start-weight-decay end-weight-decay weight-decay-incr-style
        apply-wd-to-qk-layernorm no-weight-decay-cond-type clip-grad adam-beta1 adam-beta2 adam-eps
        decoupled-lr decoupled-min-lr
        use-distributed-optimizer num-distributed-optimizer-instances use-precision-aware-optimizer
        main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype
        """,
    ),
    Family(
        "learning rate",
        "the scheduler is captured with its count of steps",
        """
        lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction lr-warmup-iters
        lr-warmup-samples lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples
        override-opt_param-scheduler override-opt-param-scheduler use-checkpoint-opt_param-scheduler
        use-checkpoint-opt-param-scheduler
        """,
    ),
    Family(
        "length of training",
        "counters are captured; the clock of an exit starts with the process",
        """
        micro-batch-size global-batch-size rampup-batch-size decrease-batch-size-if-needed
        step-batch-size-schedule train-iters train-samples exit-interval exit-duration-in-mins
        exit-signal-handler exit-signal-handler-for-dataloader
        """,
    ),
    Family(
        "checks and housekeeping of a step",
        "collective where they are, and nothing is kept from one step to the next",
        """
        check-weight-hash-across-dp-replicas-interval train-sync-interval empty-unused-memory-level
        manual-gc manual-gc-interval no-manual-gc-eval disable-manual-gc-eval
        no-check-for-nan-in-loss-and-grad check-for-large-grads check-for-spiky-loss rerun-mode
        """,
    ),
    Family(
        "reduction of gradients and gathering of parameters",
        "buckets, handles and flags of an interrupted step are reset, gathers are forced",
        """
        overlap-grad-reduce no-align-grad-reduce overlap-param-gather no-align-param-gather
        ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw
        ddp-reduce-scatter-with-fp32-accumulation ddp-average-in-collective
        no-gradient-reduce-div-fusion
        """,
    ),
    Family(
        "options of communicators",
        "kept with each group and given to its next communicator",
        """
        distributed-timeout-minutes distributed-timeout-seconds-after-init
        high-priority-stream-groups nccl-communicator-config-path disable-gloo-process-groups
        local-rank
        """,
    ),
    Family(
        "writing of checkpoints",
        "what is being written when a failure comes is dropped and owed again, and plans that were"
        " kept for the next save are dropped by all roles alike",
        """
        ckpt-assume-constant-structure save-interval persistent-save-interval save-retain-interval
        async-save use-persistent-ckpt-worker non-persistent-save-interval
        non-persistent-global-ckpt-dir no-ckpt-fully-parallel-save
        disable-ckpt-fully-parallel-save ckpt-fully-parallel-save
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        use-dist-ckpt dist-ckpt-format
        """,
    ),
    Family(
        "loading of checkpoints",
        "once, before generation 0; a fall-back to a checkpoint has arguments of its own",
        """
        load pretrained-checkpoint finetune ckpt-step load-main-params-from-ckpt no-load-optim
        no-load-rng use-checkpoint-args use-mp-args-from-checkpoint-args exit-on-missing-checkpoint
        no-use-tokenizer-model-from-checkpoint-args disable-use-tokenizer-model-from-checkpoint-args
        auto-detect-ckpt-format ckpt-fully-parallel-load dist-ckpt-strictness
        """,
    ),
    Family(
        "evaluation",
        "the resume point says how much of it is owed",
        """
        eval-iters eval-interval start-eval-at-iter eval-global-batch-size eval-micro-batch-size
        validation-set-names
        """,
    ),
    Family(
        "data",
        "read only; a position in it follows from the counters",
        """
        data-path train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path split data-cache-path mock-data seq-length num-workers
        no-mmap-bin-files num-dataset-builder-threads mid-level-dataset-surplus reset-position-ids
        reset-attention-mask eod-mask-loss no-create-attention-mask-in-dataloader
        sft-tokenizer-prompt-format disable-msc
        """,
    ),
    Family(
        "tokenizer",
        "made anew by each process, and never changed",
        """
        tokenizer-type tokenizer-model tokenizer-metadata tokenizer-special-tokens legacy-tokenizer
        vocab-file merge-file vocab-extra-ids tiktoken-pattern tiktoken-num-special-tokens
        tiktoken-special-tokens tokenizer-sentencepiece-legacy tokenizer-hf-use-fast
        tokenizer-hf-include-special-tokens trust-remote-code allow-ambiguous-pad-tokens
        tokenizer-hf-no-use-fast tokenizer-hf-no-include-special-tokens chat-template
        null-tokenizer-eod-id null-tokenizer-pad-id disable-pad-vocab-size no-pad-vocab-size
        disable-tokenizer-sentencepiece-ignore-extra-whitespaces
        no-tokenizer-sentencepiece-ignore-extra-whitespaces
        """,
    ),
    Family(
        "logging",
        "writers are opened by the process that has the role; what was told is not told again",
        """
        log-interval log-params-norm log-throughput log-progress log-num-zeros-in-grad
        log-max-attention-logit log-energy log-memory-interval log-memory-to-tensorboard
        log-device-memory-used log-timers-to-tensorboard log-validation-ppl-to-tensorboard
        log-world-size-to-tensorboard no-log-loss-scale-to-tensorboard
        disable-log-loss-scale-to-tensorboard no-barrier-with-level-1-timing timing-log-level
        timing-log-option logging-level tensorboard-dir tensorboard-log-interval
        tensorboard-queue-size wandb-project wandb-exp-name wandb-save-dir wandb-entity
        """,
    ),
    Family(
        "one_logger",
        "it is refused where its package is installed, else it does nothing",
        """
        no-one-logger one-logger-project one-logger-run-name one-logger-async app-tag-run-name
        app-tag-run-version
        """,
    ),
    Family(
        "options of what is refused",
        "read only where the flag is given that they belong to",
        """
        fp8-quantizer-factory fp4-recipe fp4-quantizer-factory tp-comm-overlap-cfg
        no-tp-comm-bulk-wgrad disable-tp-comm-bulk-wgrad no-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-dgrad no-tp-comm-overlap-ag disable-tp-comm-overlap-ag
        no-tp-comm-overlap-rs disable-tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        no-tp-comm-split-ag disable-tp-comm-split-ag no-tp-comm-split-rs disable-tp-comm-split-rs
        tp-comm-bootstrap-backend wgrad-deferral-limit ep-overlap-early-attn-memory-release
        moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms
        moe-upcycling-granularity cuda-graph-warmup-steps cuda-graph-scope offload-modules
        min-offloaded-tensor-size optimizer-offload-fraction use-torch-optimizer-for-cpu-offload
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params sgd-momentum muon-momentum
        muon-no-split-qkv muon-use-nesterov muon-scale-mode muon-fp32-matmul-prec muon-num-ns-steps
        muon-tp-mode muon-extra-scale-factor qk-clip-alpha qk-clip-threshold
        profile-step-start profile-step-end profile-ranks
        use-pytorch-profiler disable-symmetric-registration sharp-enabled-group
        adlr-autoresume-interval error-injection-type calc-ft-timeouts ft-num-warmup-iters
        straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump
        replication-factor ckpt-convert-save inprocess-max-iterations
        inprocess-monitor-thread-interval inprocess-monitor-process-interval
        inprocess-progress-watchdog-interval inprocess-heartbeat-interval inprocess-soft-timeout
        inprocess-hard-timeout inprocess-heartbeat-timeout inprocess-barrier-timeout
        inprocess-completion-timeout inprocess-last-call-wait inprocess-termination-grace-time
        inprocess-granularity inprocess-active-world-size inprocess-empty-cuda-cache
        dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-loss-coeff
        dsa-indexer-use-sparse-loss fim-rate fim-spm-rate fim-split-sample fim-fragment-rate
        fim-no-prefix fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token
        """,
    ),
    Family(
        "old names",
        "Megatron-LM ends the run, or does nothing",
        """
        help batch-size warmup model-parallel-size checkpoint-activations moe-extended-tp
        no-async-tensor-model-parallel-allreduce disable-async-tensor-model-parallel-allreduce
        fp8-interval use-mcore-models
        """,
    ),
)
