"""Reading TTGIR, Triton's last form of a kernel in tensors: how layouts change in its loops."""

import re

_LOOP = re.compile(r"^(\s*).*\bscf\.for\b")
_CONVERTED = re.compile(r"ttg\.convert_layout .*?: tensor<(?:\d+x)*(.+?), (#.*?)> -> ")
_COPY = re.compile(r"async_copy_global_to_local|async_tma_copy_global_to_local|ttng\.async_tma")


def conversions(ttgir: str) -> int:
    """Number of layout conversions in pipelined loops, which take a round trip through shared memory or
    registers of other threads for each block: of addresses, table entries and operands as they are loaded.
    Scores and their sums, results of matrix products or in fp32, are not counted."""
    lines, found = ttgir.splitlines(), 0
    for i, line in enumerate(lines):
        head = _LOOP.match(line)
        if not head:
            continue
        end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith(head[1] + "}"))
        body = lines[i + 1 : end]
        if any(_LOOP.match(each) for each in body) or not any(_COPY.search(each) for each in body):
            continue
        kinds = [each for line in body for each in _CONVERTED.findall(line)]
        found += sum(kind != "f32" and "mma" not in layout for kind, layout in kinds)
    return found
