"""The story of a run, folded from its events, and its views; no torch.

story: the state of a run, with ``take(event)``. account: the use of the nodes' time, which the
coordinator keeps as well. narration: texts for events and failures. notify: sends notices to
people elsewhere. The files of the page of ``deadpool serve`` are here, too.
"""
