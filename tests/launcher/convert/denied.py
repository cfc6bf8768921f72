"""`python -m … NAME,NAME PROGRAM ARGUMENT…`: a program on a kernel that lacks these calls."""

import ctypes
import os
import platform
import struct
import sys

# A call's number on each machine.
CALLS = {
    "x86_64": {"unshare": 272, "landlock_create_ruleset": 444, "prctl": 157},
    "aarch64": {"unshare": 97, "landlock_create_ruleset": 444, "prctl": 167},
}
_ENOSYS = 38


def deny(names: list[str]) -> None:
    """Each of these calls fails as if the kernel did not know it."""
    numbers = [CALLS[platform.machine()][name] for name in names]
    code = [(0x20, 0, 0)]
    code += [(0x15, len(numbers) - i, number) for i, number in enumerate(numbers)]
    code += [(0x06, 0, 0x7FFF0000), (0x06, 0, 0x00050000 | _ENOSYS)]
    data = b"".join(struct.pack("=HBBI", op, jump, 0, value) for op, jump, value in code)
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(data)
    program = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        sys.exit(f"the filter of the test was not granted: errno {ctypes.get_errno()}")


if __name__ == "__main__":
    deny(sys.argv[1].split(","))
    os.execv(sys.argv[2], sys.argv[2:])
