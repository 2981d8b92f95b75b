"""The story of a run, which its events give, and the views of it. Nothing here needs torch.

``story`` folds events into the state of a run, with the help of ``steps``. ``account`` sums the use
of the nodes' time. ``view`` joins a story and the coordinator's status. ``narration`` has the texts
for events and failures, and ``notify`` sends notices to people elsewhere. The files of the page of
``deadpool serve`` are here, too.
"""
