"""The story of a run, folded from its events, and its views; no torch.

story: the one state, with ``take(event)``. account: where the time of nodes went, which the
coordinator keeps as well. narration: words for events and failures. notify: tells people
elsewhere. The files of the page of ``deadpool serve`` lie here, too.
"""
