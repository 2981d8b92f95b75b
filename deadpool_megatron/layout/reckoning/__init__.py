"""The one reckoning of memory, for the budget, the choice of a scheme and ``deadpool plan``.

footprint  what segments take, headers and whole pages included
demand     what a plan asks of each node, and which losses it cannot bear
choice     which plans can protect a run, and which one ``mixed`` takes
"""
