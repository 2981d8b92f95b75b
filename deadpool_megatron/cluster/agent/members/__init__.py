"""The training processes of this node: their sockets, their endings, what is told of them."""
