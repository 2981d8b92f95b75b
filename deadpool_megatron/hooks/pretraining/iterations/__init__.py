"""What is known and told of an iteration.

newest     the newest one, as far as train() has to know it to be entered again behind it
values     what a step answers, and the sums of the log, as JSON and back, exactly
reporting  what the run's own records are told of Megatron-LM's numbers
logbook    TensorBoard, W&B and the lines of training_log(): each step once
wandb_rows what W&B may not have written yet
"""
