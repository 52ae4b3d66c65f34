"""What engines write to their logs, and the driver knows, while they serve."""

from __future__ import annotations

import os
import re
import subprocess
from statistics import fmean


def read_log(log, concurrency):
    """What SGLang and the plugin log while all requests of a run decode.

    SGLang's throughput is over the steps since its last line; the first after a prefill counts the
    prefill in. Speeds are averaged over time: easy stretches of a text, where many drafts are kept,
    fill more lines than they take time. The plugin's own time is the mean of all lines: few of them
    hold what it does now and then.
    """
    tokens, seconds, host_us, own_us, follows = [], [], [], [], False
    for line in log.splitlines():
        if "Prefill batch" in line:
            follows = False
        elif "Decode batch" in line:
            running = int(re.search(r"#running-req: (\d+)", line)[1])
            if follows and running == concurrency:
                per_step = re.search(r"accept len: ([\d.]+)", line)
                tokens.append(running * float(per_step[1] if per_step else 1))
                speed = float(re.search(r"gen throughput \(token/s\): ([\d.]+)", line)[1])
                seconds.append(tokens[-1] / speed)
            follows = running == concurrency
        elif f"SGL_EAGLE batch {concurrency}.0, host us" in line:
            host_us.append(line.split("SGL_EAGLE ", 1)[1])
            own_us.append(float(re.search(r"; own (\d+)", line)[1]))
    return {
        "full_tok_per_s": sum(tokens) / sum(seconds) if seconds else None,
        "num_speeds": len(seconds),
        "host_us": host_us[len(host_us) // 2] if host_us else None,
        "own_us": fmean(own_us) if own_us else None,
    }


def read_capture_seconds(log):
    """Seconds of graph capture by kind, as SGLang and the plugin log them."""
    found = re.findall(r"Capture (.+?) CUDA graph end\. elapsed=([\d.]+) s", log)
    seconds = {}
    for kind, elapsed in found:
        seconds[kind] = seconds.get(kind, 0.0) + float(elapsed)
    return seconds


def gpu_memory_mib(groups):
    """MiB on the GPU by name, given the process groups; empty where the driver does not say."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    names = {group: name for name, group in groups.items()}
    used = {}
    for pid, mib in re.findall(r"(\d+), (\d+)", text):
        try:
            name = names.get(os.getpgid(int(pid)))
        except ProcessLookupError:
            continue
        if name is not None:
            used[name] = used.get(name, 0) + int(mib)
    return used
