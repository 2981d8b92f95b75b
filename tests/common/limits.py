"""The settings that tests give to runs, as arguments of a command line."""

from deadpool_megatron.settings import flag_name, has_flag


def setting_flags(**values: object) -> tuple[str, ...]:
    """Return the flags of settings, named as the fields are."""
    flags: list[str] = []
    for name, value in values.items():
        flag = flag_name(name).split()
        flags += [*flag, str(value)] if has_flag(name) else [flag[0], f"{flag[1]}={value}"]
    return tuple(flags)


#: for programs that do next to nothing
FAST = setting_flags(
    close_seconds=6,
    freeze_seconds=1.5,
    node_silence_seconds=2,
    fence_seconds=1.5,
    takeover_seconds=2,
    rejoin_seconds=12,
    restore_seconds=20,
)
#: limits that a stopped process and its node do not exceed
STOPPED = setting_flags(
    freeze_seconds=60,
    node_silence_seconds=60,
    rejoin_seconds=60,
    fence_seconds=3.2,
    takeover_seconds=2,
)
