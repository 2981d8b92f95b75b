"""Is a node fit for a run? Its facts, the links between nodes, and the judgement. No torch."""
