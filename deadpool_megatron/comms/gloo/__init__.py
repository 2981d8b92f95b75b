"""Groups on gloo.

fabric  one device per epoch, waits that can be left
poison  cuts the connections of one device: gloo has no abort
uneven  all_gather and reduce_scatter with a different size per rank
"""
