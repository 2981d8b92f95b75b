"""The succession of coordinators: the sign of life, the standbys that watch it, what one
inherits."""
