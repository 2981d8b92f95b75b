"""The judgement of nodes: which are fit for a run? No torch.

eligibility  the judgement of nodes by their facts: pure
host         facts and GPUs of this host
health       reports on it by the site's command and the kernel log
"""
