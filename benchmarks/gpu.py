"""A training step on a CUDA device, in one call of under five minutes.

    PYTHONPATH=src:. python benchmarks/gpu.py --json results/gpu.json
    PYTHONPATH=src:. python benchmarks/gpu.py --device cpu --points 16 --batch 32 --replicas 1 3 --methods eager

The second goes the same way without a device, and is quick. What the file has, in the order in which it is measured:

same_as_cpu    largest difference after one step from the same state on both devices, by the largest number of a tensor
host           of eager steps at the largest sizes: milliseconds until the calls have returned and until the device is
               done, and whether and where a step makes the host wait
steps          median milliseconds of a step, single precision, until the device is done. Of B replicas it is the whole
               step of B, and `ratio` is the time of B single steps by the time of this one
left_out       what the time did not suffice for

The methods are eager, compiled, cuda graphs (torch.compile with mode="reduce-overhead"; `skips` counts the graphs that
were not made) and gpytorch, where it is installed. Replicas need Lightning. What fails has its error in its place.
"""

import argparse
import copy
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

try:
    from common import ENTRIES, RANK, RHO, SHAPE, Batches, Step, Turn, random_entries, take_turns, timed, training_step

    from ented.factors import FactorTable
    from ented.likelihoods import Bernoulli
    from ented.model import ENTED
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed")

METHODS = {"eager": None, "compiled": "default", "cuda graphs": "reduce-overhead", "gpytorch": None}
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-8}


def minibatches(replicas: int, batch: int, steps: int = 20) -> Batches:
    """Of one model, or of several side by side."""
    data = random_entries()
    rows = torch.randint(ENTRIES, (steps, batch) if replicas == 1 else (steps, replicas, batch))
    return [(data.indices[of_step], data.values[of_step].float()) for of_step in rows]


def to(device: str, batches: Batches) -> Batches:
    return [tuple(tensor.to(device) for tensor in batch) for batch in batches]


def make_step(method: str, points: int, replicas: int, device: str) -> Step:
    """A training step whose model is made on the device."""
    if replicas > 1:
        from replicas import together  # here, since it needs Lightning
    with torch.device(device):
        models = [ENTED(FactorTable(SHAPE, RANK), Bernoulli(), points) for _ in range(replicas)]
        if replicas > 1:
            return together(models, METHODS[method])
        return training_step(models[0], mode=METHODS[method])


def make_turn(method: str, points: int, replicas: int, device: str) -> Turn:
    if method == "gpytorch":
        from step import gpytorchs

        with torch.device(device):
            return gpytorchs(points)
    step = make_step(method, points, replicas, device)

    @timed
    def marked(*batch: Tensor) -> None:
        torch.compiler.cudagraph_mark_step_begin()  # what the last step left in a graph's memory may go
        step(*batch)

    return marked


def measure(method: str, replicas: int, points: int, batch: int, device: str, rounds: int, seconds: float) -> dict:
    """Median milliseconds of a step; a turn takes about `seconds`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    turn, batches = make_turn(method, points, replicas, device), to(device, minibatches(replicas, batch))
    row = {"milliseconds": round(take_turns({method: turn}, batches, rounds, seconds)[method], 4)}
    if method == "cuda graphs":
        row["skips"] = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    return row


def same_as_cpu(points: int, batch: int, device: str) -> dict[str, dict]:
    """Largest differences after a step on either device from a state that is some steps old."""
    results = {}
    for dtype, tolerance in TOLERANCE.items():
        torch.manual_seed(0)
        model = ENTED(FactorTable(SHAPE, RANK), Bernoulli(), points).to(dtype)
        batches = [(indices, values.to(dtype)) for indices, values in minibatches(1, batch)]
        step = training_step(model)
        for before in batches[:-1]:
            step(*before)
        after = []
        for where in "cpu", device:
            there = copy.deepcopy(model).to(where)
            ((indices, values),) = to(where, batches[-1:])
            bound, log_prob = there.step(indices, values, ENTRIES / batch, RHO)
            state = there.q.state_dict() | {"Z.grad": there.Z.grad, "X.grad": there.inducing.X.grad}
            state |= {"bound": bound, "log_prob": log_prob}
            after.append({name: tensor.cpu() for name, tensor in state.items()})
        ours, theirs = after
        differences = {name: ((ours[name] - theirs[name]).abs().max() / ours[name].abs().max()).item() for name in ours}
        results[str(dtype).removeprefix("torch.")] = {
            "same": max(differences.values()) <= tolerance,
            "tolerance": tolerance,
            "differences": differences,
        }
    return results


def host(points: int, batch: int, replicas: int, device: str) -> dict:
    """Median time until the calls of a step return and until the device is done, and whether the host waits."""
    step = make_step("eager", points, replicas, device)
    batches, returned, done = to(device, minibatches(replicas, batch)), [], []
    for of_step in batches:
        start = time.perf_counter()
        step(*of_step)
        returned.append(1e3 * (time.perf_counter() - start))
        if device == "cuda":
            torch.cuda.synchronize()
        done.append(1e3 * (time.perf_counter() - start))
    row = {"returned": round(statistics.median(returned), 4), "done": round(statistics.median(done), 4), "waits": None}
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")  # an operation that would wait raises
        try:
            step(*batches[0])
            row["waits"] = False
        except RuntimeError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            row |= {"waits": True, "where": f"{Path(place.filename).name}:{place.lineno}", "error": one_line(error)}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return row


def attempt(function: Callable[..., dict], **arguments) -> dict:
    """What the function returns, or the error, whatever a library or compiler raises: the rest is to be measured."""
    try:
        return function(**arguments)
    except Exception as error:
        return {"error": one_line(error)}


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--points", type=int, nargs="+", default=[100, 512])
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=0.05, help="seconds of a round")
    parser.add_argument("--budget", type=float, default=270, help="seconds after which nothing new is started")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device")
    warnings.filterwarnings("ignore")
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "same_as_cpu": attempt(same_as_cpu, points=arguments.points[0], batch=arguments.batch[0], device=device),
        "host": [],
        "steps": [],
        "left_out": [],
    }
    for replicas in arguments.replicas:
        cell = {"replicas": replicas, "points": max(arguments.points), "batch": max(arguments.batch)}
        result["host"].append(cell | attempt(host, **cell, device=device))
    cells = [
        (method, replicas, points, batch)
        for compiles in (False, True)  # last: one of these takes longer than all that do not
        for replicas in arguments.replicas
        for batch in arguments.batch
        for points in arguments.points
        for method in arguments.methods
        if compiles == (METHODS[method] is not None) and (method != "gpytorch" or replicas == 1)
    ]
    single, longest = {}, dict.fromkeys(METHODS, 0.0)
    for method, replicas, points, batch in cells:
        cell = {"method": method, "replicas": replicas, "points": points, "batch": batch}
        begun = time.perf_counter()
        if begun - started + longest[method] > arguments.budget:
            result["left_out"].append(cell)
        else:
            row = attempt(measure, **cell, device=device, rounds=arguments.rounds, seconds=arguments.turn)
            if replicas == 1:
                single[method, points, batch] = row.get("milliseconds")
            elif "milliseconds" in row and single.get((method, points, batch)):
                row["ratio"] = round(replicas * single[method, points, batch] / row["milliseconds"], 3)
            longest[method] = max(longest[method], time.perf_counter() - begun)
            result["steps"].append(cell | row | {"seconds": round(time.perf_counter() - begun, 1)})
            print("  ".join(f"{name} {value}" for name, value in result["steps"][-1].items()), flush=True)
        if arguments.json:  # after every cell, so that there is something if this is stopped
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "steps"}, indent=1))


if __name__ == "__main__":
    main()
